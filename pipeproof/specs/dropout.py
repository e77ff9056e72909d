"""The section ``model.dropout``: which elements are set to zero at random while a model trains."""

from __future__ import annotations

from pydantic import Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from pipeproof.specs.problems import Problem, problems_error
from pipeproof.specs.section import Section

_ALL = ("embedding", "attention", "hidden")


class DropoutSpec(Section):
    """Which share of elements is set to zero, and the rest divided by what is left. One number sets all three.

    Which elements those are depends on run.seed, the step, the micro-batch, the layer and the element's place in the
    whole tensor, and on nothing else.
    """

    embedding: float = Field(default=0.0, ge=0, lt=1, description="Of embedded tokens.")
    attention: float = Field(default=0.0, ge=0, lt=1, description="Of the probabilities of attention.")
    hidden: float = Field(
        default=0.0, ge=0, lt=1, description="Of what attention, and the MLP or experts, add to their input."
    )

    @model_validator(mode="before")
    @classmethod
    def _from_one_number(cls, value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return value
        if not 0 <= value < 1:
            message = f"`model.dropout` is a share of at least 0 and less than 1, found {value}"
            raise problems_error([Problem("PP106", (), message, help="such as 0.1; 0 leaves everything as it is")])
        return dict.fromkeys(_ALL, value)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The schema of the mapping, or of one number."""
        mapping = handler.resolve_ref_schema(handler(schema))
        description = mapping.pop("description")
        return {
            "title": mapping.pop("title"),
            "description": description,
            "anyOf": [{"type": "number", "minimum": 0, "exclusiveMaximum": 1}, mapping],
        }
