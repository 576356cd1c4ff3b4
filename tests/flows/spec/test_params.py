"""Values of parameters: a float is a float however it is written, also among its choices."""

from __future__ import annotations

from flows.spec.params import ParamSpec, resolve_params, value_error


def test_a_float_of_a_past_run_is_still_one_of_its_choices() -> None:
    param = ParamSpec(type="float", default=1, choices=[1, 2.5])
    resolved = resolve_params("p", {"size": param}, {})
    assert resolved == {"size": 1.0} and isinstance(resolved["size"], float)
    assert value_error(param, resolved["size"]) == ""
    assert value_error(ParamSpec(type="enum", default=1, choices=[1]), 1.0) == "must be one of 1, not 1.0"
