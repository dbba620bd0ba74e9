"""How much structure a body may have: typing it holds up every other stream."""

from __future__ import annotations

import json

import pytest

from daemon.api import body
from daemon.errors import BadRequest

USER = {"role": "user", "content": "x"}


def test_an_object_has_a_bounded_number_of_keys() -> None:
    most = {str(number): 1 for number in range(body.MAX_KEYS)}
    assert body.parse(json.dumps({"logit_bias": most}).encode()) == {"logit_bias": most}
    with pytest.raises(BadRequest, match="keys"):
        body.parse(json.dumps({"logit_bias": most | {"one more": 1}}).encode())


def test_a_body_has_a_bounded_number_of_objects() -> None:
    data = {"messages": [USER] * (body.MAX_OBJECTS - 1)}
    assert body.parse(json.dumps(data).encode()) == data
    with pytest.raises(BadRequest, match="objects"):
        body.parse(json.dumps({"messages": [USER] * body.MAX_OBJECTS}).encode())
