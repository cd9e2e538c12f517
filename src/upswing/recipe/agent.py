"""The `agent` section: an agent program that plays the tasks."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from upswing.recipe.fields import Count, Section, Text, refuse


class AgentSection(Section):
    """An agent program that plays the tasks in place of the environment's own loop, through the training proxy
    (docs/agents.md). The environment still gives the tasks, and the expert of SFT. A plain string is `function`."""

    function: Text | None = Field(
        default=None, description="A function run(task, base_url, api_key): my_pkg.agent:run or path/agent.py:run."
    )
    command: tuple[Text, ...] | None = Field(
        default=None, min_length=1, description="Or a command: the task on stdin, the answer on stdout's last line."
    )
    protocol: Literal["hermes", "tags", "llama3_json", "qwen_coder_xml", "python"] = Field(
        default="hermes", description="How the model writes tool calls (docs/environments.md)."
    )
    tools_in: Literal["template", "system", "nowhere"] = Field(
        default="template",
        description="Where the model reads of the program's tools: the chat template, the system message, or nowhere.",
    )
    max_turns: Count = Field(default=50, description="Model calls of one trajectory; further ones are refused.")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.function is None) == (self.command is None):
            both = "both" if self.function is not None else "neither"
            raise refuse("function", f"got {both} of function and command; give exactly one")
        if self.tools_in == "template" and self.protocol in ("tags", "python"):
            raise refuse(
                "tools_in",
                f"got 'template', but no chat template explains protocol {self.protocol}; allowed: system, nowhere",
            )
        return self
