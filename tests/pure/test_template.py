"""Templates of a few lines, each for one thing that the renderer does."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from daemon.errors import BadRequest, TemplateFailed, Unsupported
from daemon.prompt import template as module
from daemon.prompt.template import TEMPLATE_KWARGS, ChatPrompt, Template

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def clock() -> datetime.datetime:
    return datetime.datetime(2024, 3, 5, 14, 7, 9)


def made(source: str, **options: Any) -> Template:
    return Template(source, clock=clock, **options)


def render(source: str, *messages: dict[str, Any], **chat: Any) -> str:
    return made(source).render(ChatPrompt(messages=list(messages), **chat))


def user(content: Any = "hello") -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_a_chat_with_every_turn() -> None:
    text = render(CHATML, {"role": "system", "content": "S"}, user("U"), {"role": "assistant", "content": "A"}, user())
    assert text == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_without_a_generation_prompt() -> None:
    assert render(CHATML, user(), add_generation_prompt=False) == "<|im_start|>user\nhello<|im_end|>\n"


def test_null_and_missing_content_are_empty() -> None:
    for message in ({"role": "assistant", "content": None}, {"role": "assistant"}):
        assert "<|im_start|>assistant\n<|im_end|>" in render(CHATML, user(), message)


def test_parts_are_lines_for_a_template_that_knows_strings_only() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "user\none\ntwo<|im_end|>" in render(CHATML, user(parts))


PARTS_ONLY = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
BOTH = (
    "{% for m in messages %}{% if m.content is string %}({{ m.content }}){% else %}"
    "{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endif %}{% endfor %}"
)


def test_a_template_that_goes_over_parts_gets_parts() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render(PARTS_ONLY, user("plain"), user(parts)) == "[plain][one][two]"
    assert render(BOTH, user("plain"), user(parts)) == "(plain)[one][two]"


def test_developer_is_system_except_where_the_template_means_it() -> None:
    developer = {"role": "developer", "content": "D"}
    assert "<|im_start|>system\nD" in render(CHATML, developer, user())
    gpt = "{# <|channel|> #}{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    assert render(gpt, developer, user("U")) == "developer:D;user:U;"


NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)


def test_system_texts_join_the_next_user_message_where_the_template_has_no_system() -> None:
    system = {"role": "system", "content": "S"}
    assert render(NO_SYSTEM, system, user("U")) == "<user>S\nU"
    assert render(NO_SYSTEM, user("U"), {"role": "assistant", "content": "A"}, system, system, user("V")) == (
        "<user>U<assistant>A<user>S\nS\nV"
    )
    assert render(NO_SYSTEM, system) == "<user>S"
    assert render(NO_SYSTEM, system, user([{"type": "text", "text": "U"}])) == "<user>S\nU"


ITEMS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}("
    "{% for k, v in c.function.arguments|items %}{{ k }}={{ v }}{% endfor %}){% endfor %}{{ m.content }}{% endfor %}"
)
CONCATENATED = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}"
    "{{ m.content }}{% endfor %}"
)
AS_JSON = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize("arguments", ['{"x": 1}', {"x": 1}])
def test_arguments_come_as_the_template_takes_them(arguments: Any) -> None:
    message = {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": arguments}}],
    }
    assert render(ITEMS, user(""), message) == "f(x=1)"
    assert render(CONCATENATED, user(""), message) == 'f{"x": 1}'
    assert (
        render(AS_JSON, user(""), message) == '{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}'
    )


@pytest.mark.parametrize("arguments", ["{", "[1]", "3", "NaN", '{"x": NaN}', "[" * 100_000])
def test_arguments_that_are_no_object_are_named_where_the_template_needs_one(arguments: str) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(BadRequest, match=r"messages\[1\]\.tool_calls\[0\]\.function\.arguments"):
        render(ITEMS, user(), {"role": "assistant", "tool_calls": [call]})


def test_reasoning_of_history_reaches_the_template_under_one_name() -> None:
    source = "{% for m in messages %}{{ m.reasoning_content or '' }}|{{ m.content }};{% endfor %}"
    for key in ("reasoning_content", "reasoning"):
        assert render(source, user("U"), {"role": "assistant", "content": "A", key: "R"}) == "|U;R|A;"


def test_unknown_fields_do_not_reach_the_template() -> None:
    source = "{{ messages | tojson }}"
    assert render(source, user("U") | {"cache_control": {"type": "x"}}) == '[{"role": "user", "content": "U"}]'


def test_tools_are_given_in_one_shape_or_not_at_all() -> None:
    source = "{{ messages[0].content }}{% if tools is defined %}{{ tools | tojson }}{% endif %}"
    tool = {"type": "function", "function": {"strict": True, "name": "f"}}
    assert render(source, user("U"), tools=[tool]) == (
        'U[{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]'
    )
    assert render(source, user("U"), tools=[]) == "U"


def test_template_kwargs_reach_the_template() -> None:
    source = "{{ messages[0].content }}{{ enable_thinking }}{{ reasoning_effort }}<think>"
    assert render(source, user(""), template_kwargs={"reasoning_effort": "high"}) == "Truehigh<think>"
    assert render(source, user(""), template_kwargs={"enable_thinking": False}) == "False<think>"


def test_no_template_kwarg_replaces_what_the_daemon_passes() -> None:
    assert not TEMPLATE_KWARGS & {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"}
    text = made(CHATML).render(ChatPrompt(messages=[user()], template_kwargs={"messages": "no", "tools": "no"}))
    assert "hello" in text


def test_thinking_is_asked_for_only_where_thoughts_have_a_place() -> None:
    source = "{{ messages[0].content }}{{ enable_thinking }}"
    assert render(source, user("")) == "False"


def test_the_last_message_is_continued_without_the_end_of_its_turn() -> None:
    answer = {"role": "assistant", "content": "North is "}
    text = render(CHATML, user(), answer, continue_final_message=True)
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nNorth is "
    parts = {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert render(BOTH, user("U"), parts, continue_final_message=True) == "(U)[a][b"


def test_trailing_space_of_a_continued_message_stays_though_the_template_trims() -> None:
    trimming = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
    text = render(trimming, user(" U "), {"role": "assistant", "content": " A "}, continue_final_message=True)
    assert text == "<user>U</><assistant>A "


def test_reasoning_is_continued_where_there_is_no_content() -> None:
    source = "{% for m in messages %}<think>{{ m.reasoning_content }}</think>{{ m.content }}{% endfor %}"
    message = {"role": "assistant", "reasoning_content": "Let me"}
    assert render(source, user("U"), message, continue_final_message=True) == "<think></think>U<think>Let me"


def test_what_cannot_be_continued_is_an_error() -> None:
    with pytest.raises(BadRequest, match="continue_final_message"):
        render(CHATML, user(), continue_final_message=True)
    with pytest.raises(BadRequest, match="continue_final_message"):
        render(CHATML, user(), {"role": "assistant", "tool_calls": [CALL]}, continue_final_message=True)
    dropping = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(TemplateFailed, match="leaves out"):
        render(dropping, user(), {"role": "assistant", "content": "A"}, continue_final_message=True)


def test_the_templates_own_bos_and_eos_are_cut_where_the_tokenizer_adds_them() -> None:
    source = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    chat = ChatPrompt(messages=[user("<s>U")])
    assert made(source, bos_token="<s>", eos_token="</s>").render(chat) == "<s><s>U</s>"
    both = made(source, bos_token="<s>", eos_token="</s>", add_bos=True, add_eos=True)
    assert both.render(chat) == "<s>U"


def test_dates_come_from_the_clock() -> None:
    source = "{{ messages[0].content }}{{ strftime_now('%Y-%m-%d') }} {{ date_string }} {{ datetime }}"
    assert render(source, user("")) == "2024-03-05 05 Mar 2024 Mar 05 2024"


def test_functions_that_templates_rely_on() -> None:
    source = (
        "{% generation %}{{ messages[0].content }}{% endgeneration %}"
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}"
        "{% endfor %}{% set ns = namespace(x=[]) %}{% set _ = ns.x.append('a') %}{{ ns.x.pop() }}"
        "{{ ('<' | safe) + '&' }}{{ undefined_name + 'z' }}{{ [1, 2] | map('string') | tojson }}"
    )
    assert render(source, user("")) == '02a<&z["1", "2"]'


def test_json_of_templates() -> None:
    value = {"b": "é<&'\"", "a": [1, 2.5, None, True]}
    source = "{{ messages[0].content }}{{ v | tojson(OPTIONS) }}"
    for options, wanted in {
        "": '{"b": "é<&\'\\"", "a": [1, 2.5, null, true]}',
        "ensure_ascii=True, sort_keys=True": '{"a": [1, 2.5, null, true], "b": "\\u00e9<&\'\\""}',
        "separators=(',', ':')": '{"b":"é<&\'\\"","a":[1,2.5,null,true]}',
        "indent=1": '{\n "b": "é<&\'\\"",\n "a": [\n  1,\n  2.5,\n  null,\n  true\n ]\n}',
    }.items():
        program = made(source.replace("OPTIONS", options))._program.template
        assert program.render(messages=[user("")], v=value) == wanted


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.clear() }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ raise_exception.__globals__ }}{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_nothing_outside_the_sandbox_is_reached(source: str) -> None:
    with pytest.raises(TemplateFailed):
        render(source, user())


def test_a_refusal_says_what_the_template_says_and_not_what_the_client_wrote() -> None:
    source = (
        "{% if messages|length > 1 %}{{ raise_exception('Conversation roles must alternate!') }}{% endif %}"
        "{% if 'x' in messages[0].content %}{{ raise_exception('Unknown word: ' + messages[0].content) }}{% endif %}"
        "{% if 'y' in messages[0].content %}{{ raise_exception(messages[0].content) }}{% endif %}"
        "{{ messages[0].content }}"
    )
    for messages, wanted in (
        ([user(), user()], "The chat template refused the messages: Conversation roles must alternate!"),
        ([user("x secret")], "The chat template refused the messages: Unknown word:"),
        ([user("y secret")], "The chat template refused the messages."),
    ):
        with pytest.raises(TemplateFailed) as caught:
            render(source, *messages)
        assert caught.value.message == wanted


def test_a_failure_does_not_quote_the_prompt() -> None:
    with pytest.raises(TemplateFailed) as caught:
        render("{{ messages[0].content / 2 }}", user("secret"))
    assert caught.value.message == "The chat template failed with TypeError."


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% endfor %}", "{% nonsense %}", "{{ x | no_such_filter }}"])
def test_a_broken_template_is_told_with_its_line(source: str) -> None:
    with pytest.raises(TemplateFailed, match="line 2"):
        made("\n" + source)


def test_output_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CHARACTERS", 1000)
    with pytest.raises(TemplateFailed, match="more than 1000"):
        render("{{ messages[0].content }}{% for i in range(1001) %}x{% endfor %}", user(""))


@pytest.mark.parametrize(
    ("message", "error", "place"),
    [
        ({}, BadRequest, "messages[0].role"),
        ({"role": "root", "content": ""}, BadRequest, "messages[0].role"),
        ({"role": "user", "content": 3}, BadRequest, "messages[0].content"),
        ({"role": "user", "content": [3]}, Unsupported, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "image_url"}]}, Unsupported, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, BadRequest, "messages[0].content[0]"),
        ({"role": "user", "content": "", "name": 3}, BadRequest, "messages[0].name"),
        ({"role": "assistant", "reasoning_content": []}, BadRequest, "messages[0].reasoning_content"),
        ({"role": "assistant", "tool_calls": {}}, None, ""),
        ({"role": "assistant", "tool_calls": "x"}, BadRequest, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [3]}, BadRequest, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"type": "code"}]}, BadRequest, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}, BadRequest, "messages[0].tool_calls[0]"),
    ],
)
def test_malformed_messages_are_told_with_their_place(message: Any, error: Any, place: str) -> None:
    if error is None:
        assert render(CHATML, message)
        return
    with pytest.raises(error) as caught:
        render(CHATML, message)
    assert caught.value.param == place
    assert place in caught.value.message


@pytest.mark.parametrize("tool", [3, {}, {"type": "code"}, {"type": "function", "function": {}}])
def test_malformed_tools_are_told_with_their_place(tool: Any) -> None:
    with pytest.raises(BadRequest, match=r"tools\[0\]"):
        made(CHATML).render(ChatPrompt.model_construct(messages=[user()], tools=[tool], template_kwargs={}))


def test_no_messages_is_an_error() -> None:
    with pytest.raises(BadRequest, match="at least one"):
        render(CHATML)


def test_the_clients_messages_are_not_changed() -> None:
    message = {"role": "assistant", "content": [{"type": "text", "text": "a"}], "tool_calls": [CALL]}
    before = repr(message)
    render(ITEMS, user(), message)
    assert repr(message) == before
