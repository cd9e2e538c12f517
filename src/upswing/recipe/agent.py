"""The `agent` section: an agent program that plays the tasks."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from upswing.recipe.fields import Count, Text
from upswing.recipe.section import Section, null, opt, refuse


class AgentSection(Section):
    """An agent program that plays the tasks in place of the environment's own loop, through the training proxy
    (docs/agents.md). The environment still gives the tasks, and the expert of SFT. A plain string is `function`."""

    main_key = "function"
    function: Text | None = null("A function run(task, base_url, api_key): my_pkg.agent:run or path/agent.py:run.")
    command: tuple[Text, ...] | None = null(
        "Or a command: the task on stdin, the answer on stdout's last line.", min_length=1
    )
    protocol: Literal["hermes", "tags", "llama3_json", "qwen_coder_xml", "python"] = opt(
        "hermes", "How the model writes tool calls (docs/environments.md)."
    )
    tools_in: Literal["template", "system", "nowhere"] | None = null(
        "Where the model reads of the program's tools: the chat template, the system message, or nowhere; null: the "
        "template if it shows them, else the system message."
    )
    max_turns: Count = opt(50, "Model calls of one trajectory; further ones are refused.")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if (self.function is None) == (self.command is None):
            both = "both" if self.function is not None else "neither"
            raise refuse("function", f"got {both} of function and command; give exactly one")
        if self.tools_in == "template" and self.protocol in ("tags", "python"):
            why = f"but no chat template explains protocol {self.protocol}"
            raise refuse("tools_in", f"got 'template', {why}; allowed: system, nowhere")
        return self
