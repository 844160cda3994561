"""Parameters for the optimizer tests, trained on random gradients and compared by their bytes."""

import pytest
import torch

from fp8rs import QuantizedTensor
from fp8rs.optim import AdamW
from internals import storage_of
from tensor_formats import quantizer_of

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
#: A quantizer for every way to compute codes. Each makes only the plane that an optimizer keeps.
QUANTIZERS = {
    "current": lambda f, d: quantizer_of("tensor", f, columnwise=False),
    "current, powers of two": lambda f, d: quantizer_of(
        "tensor", f, columnwise=False, power_2_scale=True, amax_epsilon=0.5
    ),
    "delayed": lambda f, d: quantizer_of(
        "tensor",
        f,
        delayed=(torch.tensor(0.01, device=d), torch.zeros((), device=d)),
        columnwise=False,
    ),
    "rows": lambda f, d: quantizer_of("row", f, columnwise=False),
    "128x128": lambda f, d: quantizer_of("128x128", f, columnwise=False),
    "128x128, powers of two": lambda f, d: quantizer_of(
        "128x128", f, columnwise=False, power_2_scale=True, amax_epsilon=0.5
    ),
    "32x32": lambda f, d: quantizer_of("32x32", f, columnwise=False),
    "32x32, floor": lambda f, d: quantizer_of("32x32", f, columnwise=False, scale_rounding="floor"),
    "1x32": lambda f, d: quantizer_of("1x32", f),
    "1x128": lambda f, d: quantizer_of("1x128", f, columnwise=False),
}
#: Shapes larger than a block and not a multiple of it, a row, a scalar, and empty shapes.
SHAPES = [(300, 132), (70, 33), (1, 5), (), (0, 8), (8, 0), (3, 40, 36)]
each_quantizer = pytest.mark.parametrize("name", QUANTIZERS)
each_format = pytest.mark.parametrize("fp8_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])


def normal(shape, seed, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def parameter(values):
    return torch.nn.Parameter(values)


def bytes_of(*tensors):
    """Return the bytes of tensors.

    A quantized tensor contributes its planes and its delayed scaling.
    """
    parts = []
    for t in tensors:
        t = t.detach()
        if isinstance(t, QuantizedTensor):
            parts += [x for p in t.planes if p is not None for x in (p.data, p.scale)]
            parts += storage_of(t).delayed or ()
        else:
            parts.append(t)
    return [p.cpu().contiguous().reshape(-1).view(torch.uint8).clone() for p in parts]


def assert_same(got, want):
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(a, b), f"tensor {i} differs in {(a != b).sum()} of {a.numel()} bytes"


def everything(optimizer):
    """Return the bytes of all parameters and optimizer states."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [optimizer.state[p][k] for p in params for k in sorted(optimizer.state[p])]
    return bytes_of(*params, *states)


def train(optimizer, steps, grad_dtype=torch.float32, seed=0):
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(steps):
        for i, p in enumerate(params):
            grad = normal(p.shape, 1000 * seed + 100 * step + i, grad_dtype)
            # By default autograd requires a gradient of the parameter's dtype. FSDP2 may reduce in
            # another.
            p.grad = None
            p.grad_dtype = grad_dtype
            p.grad = grad.to(p.device)
        optimizer.step()


PARAMETERS = {
    **{name: lambda x, of=of: of(E4M3, "cpu")(x) for name, of in QUANTIZERS.items()},
    "bfloat16": lambda x: x.bfloat16(),
}


def mixed(device="cpu", fp8_dtype=E4M3, cols=36):
    """Return one parameter of every kind."""
    params = [
        parameter(QUANTIZERS[name](fp8_dtype, device)(normal((70, cols), i).to(device)))
        for i, name in enumerate(QUANTIZERS)
    ]
    params.append(parameter(normal((9, cols), 20).to(device)))
    params.append(parameter(normal((9, cols), 21, torch.bfloat16).to(device)))
    params.append(parameter(normal((37,), 22, torch.float16).to(device)))
    return params


def in_whole_blocks(device):
    """Return one parameter of every kind. Rows of matrices are whole blocks of 8-bit moments."""
    return mixed(device, E5M2, cols=256)


def every(param):
    """Select every parameter whose rows are whole blocks."""
    return True


def fp8_adamw(params, **options):
    """Return an optimizer with 8-bit moments."""
    return AdamW(params, state_dtype="fp8", **{"state_filter": every, **options})


#: Parameters and an optimizer for them, for each kind of moments.
each_kind_of_moments = pytest.mark.parametrize(
    "params_on, adamw",
    [(mixed, AdamW), (in_whole_blocks, fp8_adamw)],
    ids=["fp32 moments", "8-bit moments"],
)
