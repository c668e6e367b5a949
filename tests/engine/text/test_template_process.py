"""ChatRenderer: a template is a stranger's program, and gets two seconds, a megabyte and no way out."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engine.template_process import ChatRenderer, TemplateFailed

HELLO = [{"role": "user", "content": "hello"}]
FOR_EVER = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@contextmanager
def rendering(template: str, **limits: float) -> Iterator[ChatRenderer]:
    renderer = ChatRenderer(template, "<s>", "</s>", **limits)  # type: ignore[arg-type]
    try:
        yield renderer
    finally:
        renderer.close()


def failure(renderer: ChatRenderer) -> TemplateFailed:
    with pytest.raises(TemplateFailed) as caught:
        renderer.render(HELLO)
    return caught.value


def child_of(renderer: ChatRenderer) -> subprocess.Popen[bytes]:
    assert renderer._child is not None
    return renderer._child._process


def test_renders_as_chat_templates_expect() -> None:
    template = textwrap.dedent("""\
        {{ bos_token }}
        {% for message in messages %}
            {% if loop.index > 2 %}{% break %}{% endif %}
        {{ message['role'] }}={{ message.content | tojson }}
        {% endfor %}
        {% generation %}{{ 'é' }}{% endgeneration %}
        {% if add_generation_prompt and tools is none %}{{ eos_token }}{{ strftime_now('%Y')[:2] }}{% endif %}""")
    messages = [{"role": "user", "content": 'a"é\U0001f44d'}, *HELLO, *HELLO]
    with rendering(template) as renderer:
        assert renderer.render(messages) == '<s>\nuser="a\\"é\U0001f44d"\nuser="hello"\né</s>20'
        assert renderer.render(messages, add_generation_prompt=False).endswith('"hello"\né')


def test_one_child_serves_many_renderings() -> None:
    with rendering("{{ messages[0].content }}") as renderer:
        texts = [renderer.render([{"role": "user", "content": str(n)}]) for n in range(20)]
        assert texts == [str(n) for n in range(20)]
        process = child_of(renderer)
        assert process.poll() is None
    assert process.poll() is not None


def test_an_endless_template_is_ended_after_two_seconds() -> None:
    with rendering(FOR_EVER) as renderer:
        begin = time.monotonic()
        error = failure(renderer)
        assert (error.kind, str(error)) == ("timeout", "it was still running after 2 s")
        assert 1.9 < time.monotonic() - begin < 6


def test_one_long_computation_is_ended_too_even_while_compiling() -> None:
    with rendering("{{ 9 ** 99999999 }}", timeout_s=0.4) as renderer:  # constants are folded by the compiler
        assert failure(renderer).kind == "timeout"


def test_after_a_kill_the_next_rendering_gets_a_new_child() -> None:
    template = "{% if messages[0].content == 'loop' %}" + FOR_EVER + "{% endif %}fine"
    with rendering(template, timeout_s=0.5) as renderer:
        assert renderer.render(HELLO) == "fine"
        first = child_of(renderer)
        with pytest.raises(TemplateFailed):
            renderer.render([{"role": "user", "content": "loop"}])
        assert first.poll() is not None
        assert renderer.render(HELLO) == "fine"
        os.kill(child_of(renderer).pid, signal.SIGKILL)  # by somebody else, while it is idle
        child_of(renderer).wait(timeout=5)
        assert renderer.render(HELLO) == "fine"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ self._TemplateReference__context.parent }}",
        "{% include '/etc/passwd' %}",
        "{% for i in range(10000000) %}{% endfor %}",
    ],
)
def test_the_sandbox_holds(template: str) -> None:
    with rendering(template) as renderer:
        assert failure(renderer).kind == "raised"


def test_a_giant_output_is_refused() -> None:
    with rendering("{% for i in range(2000) %}{{ 'é' * 1000 }}{% endfor %}") as renderer:
        error = failure(renderer)
        assert error.kind == "too long" and "1,048,576 bytes" in str(error)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the memory limit is Linux's")
def test_a_giant_string_is_refused() -> None:
    with rendering("{% set x = messages[0].content * 2000000000 %}{{ x | length }}") as renderer:
        assert failure(renderer).kind == "memory"
        assert child_of(renderer).poll() is None  # it caught its breath


def test_a_template_that_raises_says_why_and_one_that_does_not_parse_too() -> None:
    with rendering("{{ raise_exception('Conversation roles must alternate\nand so on') }}") as renderer:
        error = failure(renderer)
        assert (error.kind, str(error)) == ("raised", "Conversation roles must alternate")
    with rendering("{% if %}") as renderer:
        assert failure(renderer).kind == "broken"
        begin = time.monotonic()
        assert failure(renderer).kind == "broken"
        assert time.monotonic() - begin < 0.05  # no child is started for it again


def test_a_process_that_cannot_be_started_is_a_failed_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with rendering("x") as renderer:
        assert "can't be started" in str(failure(renderer))


def test_close_may_be_called_twice_and_before_anything_was_rendered() -> None:
    renderer = ChatRenderer("x", "", "")
    renderer.close()
    assert renderer.render(HELLO) == "x"
    renderer.close()
    renderer.close()


def test_threads_may_share_a_renderer() -> None:
    with rendering("{{ messages[0].content }}") as renderer:
        seen: dict[int, list[str]] = {}

        def ask(number: int) -> None:
            seen[number] = [renderer.render([{"role": "user", "content": f"{number}"}]) for _ in range(20)]

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == {number: [f"{number}"] * 20 for number in range(4)}


def test_the_child_sees_no_secrets_and_not_our_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    with rendering("x") as renderer:
        renderer.render(HELLO)
        child = child_of(renderer)
        assert os.getpgid(child.pid) != os.getpgid(0)
        if sys.platform.startswith("linux"):
            with open(f"/proc/{child.pid}/environ", "rb") as environment:
                assert b"secret" not in environment.read()
            assert os.readlink(f"/proc/{child.pid}/fd/2") == os.devnull


def test_a_forgotten_renderer_takes_its_child_along() -> None:
    renderer = ChatRenderer("x", "", "")
    renderer.render(HELLO)
    process = child_of(renderer)
    del renderer
    gc.collect()
    assert process.poll() is not None


def test_no_child_outlives_the_program() -> None:
    program = (
        "from engine.template_process import ChatRenderer\n"
        "r = ChatRenderer('x', '', ''); r.render([])\n"
        "print(r._child._process.pid)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)
    assert done.stderr == ""
