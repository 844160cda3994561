"""The selection of tests, the summary of skipped ones, and the warnings that fail a test."""

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

pytestmark = pytest.mark.newest_torch
CASES = """
import warnings
import pytest

block = pytest.mark.parametrize("block, kind", [((1, 32), "a"), ((1, 32), "b"), ((4, 4), "a")])
size = pytest.mark.parametrize("size", [1, 2, 3])
flag = pytest.mark.parametrize("flag", [False, True])

@block
@size
@flag
def test_three(block, kind, size, flag): pass

@block
@size
def test_two(block, kind, size): pass

@block
@size
@flag
@pytest.mark.whole_product
def test_all(block, kind, size, flag): pass

@block
@size
def test_fixture(block, kind, size, device): pass

@flag
@pytest.mark.long
def test_takes_minutes(flag): pass

@pytest.mark.long_on_cpu
def test_takes_a_moment_on_a_gpu(device): pass

@pytest.mark.parametrize("recipe", ["block", pytest.param("row", marks=pytest.mark.second_tier)])
def test_tiers(recipe, device): pass

@flag
def test_skips(flag):
    pytest.skip("it is Monday")

@pytest.mark.parametrize("module", ["fp8rs.nn", "test_cases", "nn.test_cases", "transformers.nn"])
@pytest.mark.parametrize("category", [DeprecationWarning, FutureWarning, UserWarning])
def test_warns(module, category):
    warnings.warn_explicit("beware", category, "a.py", 1, module=module)
"""

#: Tests in one of conftest's folders `THROUGH_OPERATORS`.
OPERATORS = """
import pytest

@pytest.mark.parametrize("block", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_operators(block, size, device): pass

@pytest.mark.gpu
@pytest.mark.parametrize("block", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("flag", [False, True])
def test_kernels(block, size, flag): pass
"""


#: The runs of pytest that tests read. One process makes them, so that torch is imported once.
RUNS = {
    "usual": "-v",
    "long": "-q --long --collect-only",
    "full": "-q --full --collect-only",
    "gpu": "-q --collect-only -m gpu",
    "values": "-v --strength 1 -n 1",
}
MAIN = """
import sys, pytest
for options in sys.argv[2:]:
    pytest.main([*sys.argv[1].split("|"), *options.split()])
    print(end="\\0", flush=True)
"""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cases")
    (folder / "test_cases.py").write_text(CASES)
    (folder / "tensor").mkdir()
    (folder / "tensor" / "test_operators.py").write_text(OPERATORS)
    config = ["-c", str(TESTS.parent / "pyproject.toml"), f"--rootdir={folder}", str(folder)]
    plugins = ["-p", "no:cacheprovider", "-p", "conftest"]
    common = "|".join([*plugins, *config, "-m", "not gpu"])
    done = subprocess.run(
        [sys.executable, "-c", MAIN, common, *RUNS.values()],
        capture_output=True,
        text=True,
        cwd=TESTS,
        timeout=240,
        check=False,
    )
    assert not done.stderr, done.stderr
    return dict(zip(RUNS, done.stdout.split("\0")[:-1], strict=True))


@pytest.fixture
def usual(outputs):
    return outputs["usual"]


@pytest.fixture
def gpu(outputs):
    return outputs["gpu"]


@pytest.mark.parametrize("run, long, three", [("usual", 0, 9), ("long", 1, 9), ("full", 1, 18)])
def test_long_adds_long_tests_and_full_the_product_too(outputs, run, long, three):
    expected = {"takes_minutes": 2 * long, "takes_a_moment_on_a_gpu": long, "three": three}
    for name, count in expected.items():
        assert outputs[run].count(f"::test_{name}[") == count


def test_long_on_cpu_tests_are_short_on_a_gpu(gpu, usual):
    assert "test_takes_a_moment" not in usual
    assert "::test_takes_a_moment_on_a_gpu[cuda]" in gpu


def test_the_second_tier_runs_by_default_and_not_with_strength_1(outputs, usual, gpu):
    assert usual.count("::test_tiers[") == 2
    assert "::test_tiers[cpu-block]" in outputs["values"]
    assert "::test_tiers[cpu-row]" not in outputs["values"]
    assert gpu.count("::test_tiers[") == 2


def test_gpu_cases_contain_values_if_tests_through_operators_run_pairs_on_the_cpu(gpu, usual):
    assert usual.count("::test_operators[") == 9
    for name, count in {"operators": 3, "kernels": 9, "fixture": 9}.items():
        assert gpu.count(f"::test_{name}[") == count


def test_the_cover_contains_pairs_by_default(usual):
    # 3 blocks of two names x 3 sizes need 9 of 18 cases. The others keep every case.
    for name, count in {"three": 9, "two": 9, "all": 18, "fixture": 9}.items():
        assert usual.count(f"::test_{name}[") == count
    assert "tests: 70 of 82, a cover of each pair of parameters (all: --full)" in usual


def test_the_cover_contains_values_with_strength_1_and_xdist_workers_pass_on_their_counts(
    outputs,
):
    out = outputs["values"]
    passed = {line for line in out.splitlines() if "PASSED" in line}
    for name, count in {"three": 3, "two": 3, "all": 18, "fixture": 3}.items():
        assert sum(f"::test_{name}[" in line for line in passed) == count
    assert "tests: 37 of 82, a cover of each value of parameters (all: --full)" in out


def test_skips_are_counted_by_reason_and_not_listed(usual):
    assert usual.count("it is Monday") == 1
    assert "skipped: 2: it is Monday" in usual


def test_deprecations_fail_in_our_code(usual):
    """A deprecation between two other libraries does not fail a test."""
    failed = [line for line in usual.splitlines() if line.startswith("FAILED")]
    assert len(failed) == 10
    assert not any("transformers" in line and "UserWarning" not in line for line in failed)


@pytest.mark.parametrize("ours", ["python/fp8rs/nn/linear.py", "tests/test_cases.py"])
def test_syntax_warnings_fail_in_our_files(ours):
    """Python emits them when it compiles a file, which may belong to another library."""
    compile("1 is 1", "/env/lib/python3.12/site-packages/torchao/tests/utils.py", "exec")
    compile("1 is 1", "/env/lib/python3.12/site-packages/fp8rs/nn/linear.py", "exec")
    with pytest.raises(SyntaxError, match="is"):
        compile("1 is 1", f"/home/user/{ours}", "exec")
