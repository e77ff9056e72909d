"""The JSON Schema of plan files against the loader: it accepts plans that load, and refuses all mistakes that a schema
can express."""

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from pipeproof.diagnostics.yaml_tree import parse_text
from pipeproof.specs.plan import PlanSpec, plan_json_schema
from tests.specs.plans import example, example_plans

SCHEMA = plan_json_schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
BROKEN = Path(__file__).parent / "broken"


def test_it_is_a_schema():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["$schema"].endswith("2020-12/schema")
    json.dumps(SCHEMA)


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"transport": "partial"},
        {"transport": {"backward": "partial"}},
        {"cost": {"forward_us": [1, "1/3"], "backward_us": 0.5, "p2p_latency_us": "1/7"}},
        {"cost": {"backward_us": None, "backward_input_us": 1, "backward_weight_us": [0, 1]}},
        {"stages": [["embed", "layer.0"], ["layer.1", "layer.2", "layer.3", "norm", "head"]]},
        {"stages": "layer:TransformerLayer|EmptyLayer"},
        {"topology": {"order": ["pp", "dp", "tp", "cp", "ep"]}},
    ],
)
def test_accepts_what_loads(sections):
    plan = example(**sections)
    VALIDATOR.validate(plan)
    VALIDATOR.validate(PlanSpec.model_validate(plan).model_dump(mode="json"))


def test_accepts_the_examples():
    for path in example_plans():
        VALIDATOR.validate(yaml.safe_load(path.read_text()))


SEEN_BY_LOADING_ONLY = {
    "backward_given_twice", "backward_half_given", "cost_list_too_long", "duplicate_key", "duplicate_section",
    "float_for_integer", "heads_do_not_divide", "odd_head_size", "paddle_in_16_bits", "stages_too_few",
    "tp_does_not_divide",
}  # fmt: skip


def test_refuses_the_broken_plans_that_it_can():
    accepted = set()
    for path in BROKEN.glob("*.yaml"):
        tree = parse_text(path.read_text(), path.name)
        if tree.complete and VALIDATOR.is_valid(tree.data):
            accepted.add(path.stem)
    assert accepted == SEEN_BY_LOADING_ONLY


def fields(schema):
    yield from schema.get("properties", {}).items()
    for part in (*schema.get("$defs", {}).values(), *schema.get("anyOf", ())):
        yield from fields(part)


def test_every_key_is_described():
    names = []
    for name, field in fields(SCHEMA):
        assert re.search(r"\w", field.get("description", "")), name
        names.append(name)
    assert {"num_layers", "sequence_parallel", "recv_order", "backward_weight_us", "optimizer"} <= set(names)


def test_defaults_are_plan_values():
    for _, field in fields(SCHEMA):
        if "default" in field:
            without_default = {**field, "$defs": SCHEMA["$defs"]}
            jsonschema.Draft202012Validator(without_default).validate(field["default"])
