"""What the generator's executor adds to vLLM's, without a vLLM."""

from types import ModuleType

from spec_compat import registry


class Theirs:
    """As vLLM's: what it does beside ending its workers, it does each time."""

    shutting_down = False
    said = 0

    def shutdown(self) -> None:
        self.shutting_down = True
        self.said += 1


def test_it_is_shut_down_once() -> None:
    """At exit vLLM does it, and then the generator, when nothing is left to log with."""
    make = registry.get("extract/executor").factories["MultiprocExecutor"]
    executor = make(Theirs, ModuleType("generator"))()  # type: ignore[operator]
    executor.shutdown()
    executor.shutdown()
    assert executor.said == 1
