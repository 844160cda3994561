"""Settings for tests with random examples."""

from hypothesis import HealthCheck, settings


def examples(count: int) -> settings:
    """Return settings for ``count`` examples, which are equal in each run."""
    return settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        # The `device` fixture does not change between examples.
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
