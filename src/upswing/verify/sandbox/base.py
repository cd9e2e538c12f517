"""What a sandboxed run may use, and what comes back from it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from upswing.errors import ConfigError, EnvironmentBroken


class SandboxUnavailable(EnvironmentBroken):
    """No isolation here, or a workspace whose processes are gone. Says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """Of one run: all its processes together, except `disk_mb`, which is of the workspace with /tmp."""

    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_mb: int = 512
    processes: int = 32
    """Threads count too."""
    output_bytes: int = 1_000_000
    """stdout and stderr together."""
    disk_mb: int = 64

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            kinds = (int, float) if isinstance(one.default, float) else (int,)
            if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < 1e12:
                what = "a number" if float in kinds else "a whole number"
                raise ConfigError(f"sandbox limit {one.name}: got {value!r}; allowed: {what} above 0")


@dataclass(frozen=True, kw_only=True)
class SandboxResult:
    """`stdout` and `stderr` are what came until the end, at most `output_bytes` of both."""

    stdout: bytes
    stderr: bytes
    returncode: int | None
    """The exit code, negative for a signal; None when killed."""
    killed: str | None
    """The limit that ended it: wall, cpu, memory, output, processes; or lost: the kernel ended the whole sandbox."""
    duration_s: float
