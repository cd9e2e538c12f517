"""What the recipe's models are made of: options, the frozen base class, and how a validator names its key."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError


def opt(default: Any, description: str, **bounds: Any) -> Any:
    """A field that may be left out; of a table or section `default` is what makes one."""
    return Field(**{"default_factory" if callable(default) else "default": default}, description=description, **bounds)


def null(description: str, **bounds: Any) -> Any:
    """A field that is null unless it is given."""
    return opt(None, description, **bounds)


class Section(BaseModel):
    """A part of a recipe: frozen, and unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)
    main_key: ClassVar[str] = ""
    """What a plain string in the section's place stands for."""

    @model_validator(mode="before")
    @classmethod
    def _written_out(cls, data: Any) -> Any:
        data = {cls.main_key: data} if cls.main_key and isinstance(data, str) else data
        if not isinstance(data, dict):
            return data
        return {**data, **{key: value for key, value in cls.derived(data).items() if data.get(key) is None}}

    @classmethod
    def derived(cls, data: dict[str, Any]) -> dict[str, Any]:
        """What keys are, where they are null or left out, by the others."""
        return {}

    def refuse_given(self, keys: Iterable[str], why: str) -> None:
        """Raises for the first of `keys` that isn't null: it has no effect."""
        for key in keys:
            if (got := getattr(self, key)) is not None:
                raise refuse(key, f"got {said(got)} without effect, {why}")


def refuse(key: str, message: str) -> PydanticCustomError:
    """The error to raise when `key` is wrong because of other keys; the message then names it with its full path."""
    return PydanticCustomError("recipe", "{message}", {"key": key, "message": message})


def said(value: Any) -> str:
    """A value as YAML has it, texts in quotes."""
    return f"'{value}'" if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else f"{value}"
