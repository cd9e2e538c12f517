import pytest

from upswing.errors import ConfigError
from upswing.learn import Schedule


def test_constant_with_warmup():
    schedule = Schedule(warmup=3)
    assert [schedule(i) for i in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize(("kind", "middle"), [("linear", 0.55), ("cosine", 0.55)])
def test_decays(kind, middle):
    schedule = Schedule(kind=kind, warmup=2, total=12, final=0.1)
    assert schedule(2) == 1.0 and schedule(7) == pytest.approx(middle) and schedule(12) == pytest.approx(0.1)
    assert schedule(500) == pytest.approx(0.1)
    values = [schedule(i) for i in range(2, 13)]
    assert values == sorted(values, reverse=True)


def test_refusals():
    with pytest.raises(ConfigError, match="did you mean 'cosine'"):
        Schedule(kind="cosin", total=3)
    with pytest.raises(ConfigError, match="needs total above warmup"):
        Schedule(kind="linear", warmup=5, total=5)
