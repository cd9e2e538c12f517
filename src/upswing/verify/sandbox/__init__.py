"""The sandbox: programs that nobody has to trust. What it promises, and to whom: docs/sandbox.md.

A result is only what a program wrote and how it ended. It never says whether the program is right: expected values
stay outside, and whoever asked compares.
"""

from upswing.verify.sandbox.base import SandboxLimits, SandboxResult, SandboxUnavailable
from upswing.verify.sandbox.client import Sandbox, Workspace, default_sandbox

__all__ = ["Sandbox", "SandboxLimits", "SandboxResult", "SandboxUnavailable", "Workspace", "default_sandbox"]
