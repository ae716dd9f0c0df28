"""Chat templates: what transformers gives them, and what no template may do."""

import contextlib
import json
import re
import resource
import subprocess
import sys
import time
from datetime import datetime
from typing import Any

import jinja2.defaults
import pytest

from tfm.engine.chat import ChatTemplate
from tfm.engine.errors import TfmError
from tfm.engine.template import Environment, Template
from tfm.engine.template_calls import METHODS

MESSAGES = [
    {"role": "user", "content": "Hé <b>"}, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "?"}
]  # fmt: skip
KEYS = "rolecontent['role', 'content']"


def render(source: str, **variables: Any) -> str:
    return Template(source, "test", seconds=1.0).render({"messages": MESSAGES, **variables})


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% if true %}\n    a\n  {% endif %}\nb\n", "    a\nb"),
        ("{% for m in messages %}{{ m.role[0] }}{% if loop.last %}.{% endif %}{% endfor %}", "uau."),
        ("{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}", "Hé <b>"),
        ("{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}", "yes"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "3"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "Hé <b>"}'),
        ("{{ {'a': [1]} | tojson(indent=2) }}", json.dumps({"a": [1]}, indent=2)),
        ("{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':'), sort_keys=true) }}", '{"a":2,"b":1}'),
        ("{% generation %}{{ messages[1].content }}{% endgeneration %}!", "yes!"),
        ("{{ 'a' ~ 1 ~ none ~ missing ~ [2] }}", "a1None[2]"),
        ("{{ messages | map(attribute='content') | join('|') }}", "Hé <b>|yes|?"),
        ("{{ messages | join('|', attribute='role') }}", "user|assistant|user"),
        ("{{ ', '.join(['a', 'b']) }}{{ 'ab' * 2 }}{{ 2 ** 10 }}{{ 7 % 4 }}{{ 3 * 1.5 }}", "a, babab102434.5"),
        ("{{ '%s-%03d' % ('a', 7) }}{{ '{}-{:>4}'.format('b', 8) }}{{ '%s' | format('c') }}", "a-007b-   8c"),
        ("{{ [1, 2] + [3] }}{{ 'abc'[::-1] }}{{ messages[1:] | length }}", "[1, 2, 3]cba2"),
        ("{{ '  x '.strip() }}{{ 'a,b'.split(',')[1] }}{{ 'aXa'.replace('X', '--') }}", "xba--a"),
        ("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f('a') }}{{ f(f('b')) }}", "<a><<b>>"),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x | upper }}", "A1"),
        ("{{ 'yes' if messages[0].calls is defined }}{{ missing is none }}{{ tools is none }}", "FalseTrue"),
        ("{{ messages[0].get('name', 'nobody') }}", "nobody"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "2"),
        ("{{ range(3) | list }}{{ dict(a=1).items() | list }}{{ 'x' is in ['x'] }}", "[0, 1, 2][('a', 1)]True"),
        (
            "{{ 'a.b.c'.rsplit('.', 1) }}{{ 'aba'.rfind('a') }}{{ 'xaxx'.strip('x') }}{{ 'a b'.split(maxsplit=1) }}",
            "['a.b', 'c']2a['a', 'b']",
        ),
        ("{{ 'a\r\nb'.splitlines() }}{{ 'ab'.partition('b')[0] }}{{ 'ab'.startswith(('a', 'x')) }}", "['a', 'b']aTrue"),
        ("{{ '%s %% %5.2f %(' ~ '' }}{{ '100%% of %s: %.1f' % ('x', 2) }}", "%s %% %5.2f %(100% of x: 2.0"),
        ("{{ '%(k)s=%(v)r' % {'k': 'a', 'v': 'b'} }}{{ '%(k)s' | format(k=1) }}", "a='b'1"),
        ("{{ '{k:>{w}}'.format(k=1, w=3) }}{{ '{0[a]}{0.b}{{}}'.format({'a': 1, 'b': 2}) }}", "  112{}"),
        ("{{ 'aXbX' | replace(new='-', old='X', count=1) }}{{ 12 | replace('1', 'x') }}", "a-bXx2"),
        ("{{ 2.567 | round(2) }}{{ 2.5 | round(method='floor') }}{{ [1, 2] | sum }}{{ 4 is even }}", "2.572.03True"),
        ("{{ messages | sum(attribute='n', start=1) if false }}{{ 'b a' | title }}{{ 'ab' | list }}", "B A['a', 'b']"),
        ("{{ range(5) | batch(2, 'x') | list }}{{ 7 // 2 }}{{ -7 / 2 }}", "[[0, 1], [2, 3], [4, 'x']]3-3.5"),
        ("{{ ('<' ~ {'a': 1} | tojson | safe) ~ '>' }}{{ 'a' is sequence }}{{ 1 is sequence }}", '<{"a": 1}>TrueFalse'),
        ("{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{% set j = joiner() %}{{ j() }}{{ j() }}", "ab, "),
        ("{% for m in [[[]], []] recursive %}{{ loop.cycle('x', 'y') }}{{ loop(m) }}{% endfor %}", "xxy"),
        ("{% for k, v in messages[0].items() %}{{ k }}{% endfor %}{{ messages[0].keys() | list }}", KEYS),
        ("{% macro f() %}{{ caller() }}{% endmacro %}{% call f() %}a{% endcall %}{% block b %}B{% endblock %}", "aB"),
        (
            "{% for m in [{'content': [{'type': 'text', 'text': ' a '}, {'type': 'image'}]}] %}"
            "{% if m.content is string %}{{ m.content }}{% elif m.content is iterable and m.content is not mapping %}"
            "{% for item in m['content'] %}{{ item['text'] | trim if item.type == 'text' else '<image>' }}{% endfor %}"
            "{% endif %}{% endfor %}",
            "a<image>",
        ),
        ("{{ 'line\nline' | indent(2) }}{{ 'ab' | center(4) }}", "line\n  line ab "),
    ],
)  # fmt: skip
def test_as_in_transformers(source: str, text: str) -> None:
    """Templates of published models use all of these; another setting of Jinja writes other spaces and lines."""
    assert render(source, tools=None) == text


def test_date_of_today() -> None:
    """Some models are told the date."""
    before, text, after = datetime.now(), render("{{ strftime_now('%d %b %Y') }}"), datetime.now()
    assert text in {moment.strftime("%d %b %Y") for moment in (before, after)}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{{ raise_exception('two\nlines') }}", "two lines"),
        ("{{ messages[9].content }}", "list object has no element 9"),
        ("{{ messages.content + 'x' }}", "has no attribute 'content'"),
        ("{{ 1 + 'x' }}", "unsupported operand"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages | tojson('x', 1, 2, 3, 4, 5) }}", "arguments"),
        ("{{ unknown() }}", "'unknown' is undefined"),
        ("{% include 'x' %}", "no loader"),
        ("{{ [][0].x }}", "no element 0"),
        ("{{ {'a': missing} | tojson }}", "not JSON serializable"),
    ],
)  # fmt: skip
def test_failure_is_one_line(source: str, found: str) -> None:
    """A template that fails, or refuses the conversation, is an error with the template's name and no traceback."""
    with pytest.raises(TfmError, match=re.escape(found)) as caught:
        render(source)
    assert str(caught.value).startswith("test: chat template: found ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["{% if %}", "{{ 'a }}", "{% endfor %}", "{% nonsense %}", "{{ x | nonsense }}"])
def test_template_that_is_not_jinja(source: str) -> None:
    """The line of the mistake is told."""
    with pytest.raises(TfmError, match=r"test: chat template: found .*\(line 2\)"):
        Template("\n" + source, "test")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''['__class__'] }}{{ ''['__class__']['__base__'] }}",
        "{{ (messages | attr('__class__')).__init__ }}",
        "{{ raise_exception.__globals__ }}{{ raise_exception.__globals__['os'] }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ self.__init__.__globals__ }}{{ self._TemplateReference__context.environment }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
        "{{ ('{0.__cl' ~ 'ass__}').format(raise_exception) }}",
        "{{ messages | map(attribute='__class__') | map(attribute='__mro__') | list }}",
        "{{ joiner.__call__.__func__.__code__ }}",
        "{% set messages[0].role = 'x' %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ messages.clear() }}",
        "{% for m in messages %}{{ m.pop('role') }}{% endfor %}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ lipsum(n=2) }}",
        "{% macro f() %}{% endmacro %}{{ f._func.__globals__ }}",
    ],
)
def test_no_way_out_of_the_sandbox(source: str) -> None:
    """A template is a stranger's program: it may neither reach Python's internals nor change the conversation."""
    before = json.dumps(MESSAGES)
    try:
        text = render(source)
    except TfmError:
        text = ""
    assert not re.search(r"class|function|module|code|object at|globals|environment", text.lower())
    assert json.dumps(MESSAGES) == before


def doubling(start: str, step: str) -> str:
    """A template that takes a step of doubling 60 times."""
    return f"{{% set ns = namespace(x={start}) %}}{{% for i in range(60) %}}{{% set ns.x = {step} %}}{{% endfor %}}"


FOR_EVER = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}"
    "{% endfor %}{% endfor %}",
    "recursive macro": "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "filters": "{% for a in range(99999) %}{{ range(99999) | map('string') | list | sort | length }}{% endfor %}",
    "generators": "{% for a in range(99999) %}{% if range(99999) | select('gt', 5) | map('upper') | list %}{% endif %}"
    "{% endfor %}",
}  # fmt: skip
TOO_MUCH = {
    "repeated text": "{{ 'a' * 10000000000 }}",
    "repeated list": "{{ [1] * 10000000000 }}",
    "number before text": "{{ 10000000000 * 'a' }}",
    "power": "{{ 10 ** 10000000 }}",
    "tower of powers": doubling("9", "ns.x * ns.x"),
    "doubling": doubling("'ab'", "ns.x + ns.x"),
    "doubling by ~": doubling("'ab'", "ns.x ~ ns.x"),
    "doubling by replace": doubling("'aa'", "ns.x.replace('a', 'aa')"),
    "doubling by the filter": doubling("'aa'", "ns.x | replace('a', 'aa')"),
    "doubling by join": doubling("'aa'", "ns.x.join([ns.x, ns.x])"),
    "doubling by set": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "lists of lists": doubling("['ab']", "[ns.x, ns.x]") + "{{ ns.x }}",
    "lists of lists as JSON": doubling("['ab']", "[ns.x, ns.x]") + "{{ ns.x | tojson | length }}",
    "lists of lists as text": doubling("['ab']", "[ns.x, ns.x]") + "{{ ns.x | string | length }}",
    "lists of lists compared": doubling("[1]", "[ns.x, ns.x]") + doubling("[1]", "[no.x, no.x]").replace("ns", "no")
    + "{{ ns.x == no.x }}",
    "dicts of dicts": doubling("'ab'", "{'a': ns.x, 'b': ns.x}"),
    "tuples of tuples": doubling("'ab'", "(ns.x, ns.x)"),
    "tuples of arguments": "{% set ns = namespace(x='ab') %}{% macro f() %}{% set ns.x = varargs %}{% endmacro %}"
    "{% for i in range(60) %}{{ f(ns.x, ns.x) }}{% endfor %}",
    "slices kept": "{% macro f(n, x) %}{{ f(n + 1, x[:]) }}{% endmacro %}{{ f(0, [1] * 4000000) }}",
    "width by the filter": "{{ 'a' | center(10000000000) }}",
    "width by the method": "{{ 'a'.ljust(10000000000) }}{{ 'a'.zfill(10000000000) }}",
    "width of a format": "{{ '{:>10000000000}'.format('a') }}",
    "width in a field": "{{ '{:>{}}'.format('a', 10000000000) }}",
    "width of a percent format": "{{ '%10000000000s' % 'a' }}",
    "width by a star": "{{ '%*s' % (10000000000, 'a') }}{{ '%*s' | format(10000000000, 'a') }}",
    "width of tabs": "{{ '\t'.expandtabs(10000000000) }}",
    "width of an indent": "{{ 'a\na' | indent(10000000000) }}",
    "indent of JSON": "{{ [[[1]]] | tojson(indent=10000000000) }}",
    "batches": "{{ [1] | batch(10000000000, 'x') | list }}",
    "slices": "{{ [1] | slice(10000000000) | list }}",
    "wide times": "{{ strftime_now('%10000000000Y') }}{{ strftime_now('%_10000000000Y') }}",
    "joined": "{{ ('a' * 1000000).join(range(100000) | list) }}",
    "joined by the filter": "{{ range(100000) | join('a' * 1000000) }}",
    "output": "{% for i in range(99999) %}{% for j in range(9999) %}{{ 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa' * 1000 }}"
    "{% endfor %}{% endfor %}",
    "output of a literal": "{% for i in range(99999) %}" + "a" * 10000 + "{% endfor %}",
    "a long range": "{{ range(10000000000) | list }}",
}  # fmt: skip


@pytest.mark.parametrize("source", [*FOR_EVER.values(), *TOO_MUCH.values()], ids=[*FOR_EVER, *TOO_MUCH])
def test_refused_in_bounded_time_and_memory(source: str) -> None:
    """A template that never ends, or that makes gigabytes of nothing, took the machine with it."""
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    with pytest.raises(TfmError, match="test: chat template: found"):
        render(source)
    assert time.perf_counter() - begin < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < (1 << 20)  # KiB


def test_for_ever_is_not_tried_for_ever() -> None:
    """Guards against a batch of ten thousand rows that waits seconds for each, since every one is refused anew."""
    slow = "{% if messages %}{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}{% endif %}x"
    template = Template(slow, "test", 0.2)
    late = "still running after 0.2 s"
    for found in (late, late, f"{late}, 2 times in turn"):
        with pytest.raises(TfmError, match=f"{found}; or use --raw"):
            template.render({"messages": [1]})
    begin = time.perf_counter()
    with pytest.raises(TfmError, match="2 times in turn"):
        template.render({"messages": []})
    assert time.perf_counter() - begin < 0.2
    other = Template(slow, "test", 0.2)
    for messages in ([1], [], [1]):
        with contextlib.suppress(TfmError):
            other.render({"messages": messages})
    assert other.render({"messages": []}) == "x"


AS = '{% set s = "a" * 60000 %}{% set b = "b" * 100000 %}{% set big = "a" * 8000000 %}'
ONE_LONG_OPERATION = {
    "braces": '{{ ("{" ~ ":" * 60000).format() }}',
    "braces nested": '{{ ("{:" * 60000).format(1) }}',
    "round": '{{ 1 | round(20000000, "floor") }}',
    "round below": "{{ 1 | round(-20000000) }}",
    "round of a text": '{{ "a" | round(9, "ceil") }}',
    "replace by name": AS + '{{ s | replace(new=b, old="a") }}',
    "replace in a list": AS + '{{ [s] | replace("a", b) }}',
    "replace nothing": AS + '{{ s.replace("", b) }}',
    "replace in markup": AS + '{{ (s | safe).replace("a", b) }}',
    "rfind": AS + '{{ (big).rfind("ab" + "a" * 200000) }}',
    "rindex": AS + '{{ (big).rindex("ab" + "a" * 200000) }}',
    "rsplit": AS + '{{ (big).rsplit("ab" + "a" * 200000) }}',
    "rsplit by name": AS + '{{ (big).rsplit(maxsplit=2, sep="ab" + "a" * 200000) }}',
    "rpartition": AS + '{{ (big).rpartition("ab" + "a" * 200000) }}',
    "strip": AS + '{{ ("я" * 8000000).strip("ж" * 8000000 + "я") }}',
    "trim": AS + '{{ ("я" * 8000000) | trim(chars="ж" * 8000000 + "я") }}',
    "split": '{{ ("я " * 20000000).split() | length }}',
    "splitlines": '{{ ("я\\n" * 20000000).splitlines() | length }}',
    "list of letters": '{{ ("я" * 40000000) | list | length }}',
    "sorted letters": '{{ ("я" * 40000000) | sort | length }}',
    "joined letters": '{{ ("я" * 40000000) | join | length }}',
    "translate": AS + "{{ s.translate({97: b}) }}",
    "bytes": AS + "{{ s.encode().replace(b.encode()[:1], b.encode()) }}",
    "bytes of a number": '{{ (1).to_bytes(6000000000, "big") }}',
    "width after a key": '{{ "%(a)999999999d" % {"a": 1} }}',
    "width after a key with parentheses": '{{ "%(a(b)c)999999999d" % {"a(b)c": 1} }}',
    "width after a percent": '{{ "%l%%999999999d" % (1, 1) }}',
    "width by the filter format": '{{ "%(a)999999999d" | format(a=1) }}',
    "precision": '{{ "%.999999999f" % 1 }}{{ "{:.999999999f}".format(1) }}',
    "precision in other digits": '{{ "{:٩٩٩٩٩٩٩٩٩}".format(1) }}',
    "width by an argument": '{{ "{:{w}}".format(1, w=999999999) }}',
    "a key many times": AS + '{{ ("%(a)s" * 10000) % {"a": b} }}',
    "a field many times": AS + '{{ ("{0}" * 10000).format(b) }}',
    "format_map": AS + '{{ ("{a}" * 10000).format_map({"a": b}) }}',
    "even text": '{{ "%999999999d" is even }}{{ ["%999999999d"] | select("odd") | list }}',
    "divided text": '{{ "%999999999d" is divisibleby(1) }}',
    "sum of lists": "{{ range(100000) | batch(1) | list | sum(start=[]) | length }}",
    "separators": '{{ range(100000) | list | tojson(separators=("b" * 1000000, ":")) | length }}',
    "numbers as JSON": "{% set n = 2 ** 4000 %}{{ ([n] * 4000000) | tojson | length }}",
    "numbers of many digits": '{% set n = ("f" * 8000000) | int(base=16) %}{{ n // ("f" * 4000000) | int(base=16) }}',
    "keys that collide": "{% set p = 2 ** 61 - 1 %}{{ dict(range(0, 99999 * p, p) | batch(2)) | length }}",
    "namespaces in a list": '{% set n = namespace(a="x" * 1000000) %}{{ ([n] * 1000000) | string | length }}',
    "views in a list": '{{ ([{"a": "x" * 1000000}.items()] * 1000000) | string | length }}',
    "is sequence": "{% for a in range(99999) %}{% for b in range(99999) %}{% if b is sequence %}{% endif %}"
    "{% endfor %}{% endfor %}",
    "break": "{% break %}",
    "continue": "{% if true %}{% continue %}{% endif %}",
    "nested for": "{% for a in [1] %}" * 25 + "{% endfor %}" * 25,
    "nested if": "{% if true %}" * 150 + "{% endif %}" * 150,
    "nested brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "a long sum": "{{ " + "1+" * 50000 + "1 }}",
    "cycler": "{{ cycler() }}",
    "truncate": '{{ "abc" | truncate(1) }}',
    "urlize": '{{ "a" | urlize }}',
    "a long source": "{{ a }}" * 100000,
    "clock in a closed generator": "{% set g = range(9) %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% if (g | select | first) or messages['x'] %}{% endif %}{% endfor %}{% endfor %}",
    "many names": "".join(f"{{% set b{i} %}}{{% if b{i} %}}{{% endif %}}" for i in range(5500)),
    "a message that UTF-8 cannot spell": '{{ raise_exception("\\ud800") }}',
    "many branches": "{% if a %}{% set b = 1 %}{% endif %}" * 6000 + "{{ 1 / 0 }}",
}  # fmt: skip
RENDER = """
import resource, sys
from tfm.engine.errors import TfmError
from tfm.engine.template import Environment, Template
from tfm.engine.template_calls import METHODS
begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    print("written:", Template(sys.stdin.buffer.read().decode(), "test", seconds=1.0).render({"messages": []})[:99])
except TfmError as error:
    print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begin)
"""


@pytest.mark.parametrize("source", ONE_LONG_OPERATION.values(), ids=ONE_LONG_OPERATION)
def test_no_operation_runs_away(source: str) -> None:
    """One call into C that ran for minutes held the interpreter, so that no clock could end it; some took gigabytes.

    What Python or Jinja refuse with errors of their own ended as bugs in tfm.
    """
    done = subprocess.run([sys.executable, "-c", RENDER], input=source.encode(), capture_output=True, timeout=8)
    assert done.returncode == 0, done.stderr.decode()
    text, memory = done.stdout.decode().splitlines()
    assert text.startswith("test: chat template: found "), text
    assert int(memory) < (1 << 20)  # KiB


def test_refused_method_is_named() -> None:
    """Whoever wrote the template is told which of its calls is not offered."""
    with pytest.raises(TfmError, match=r"test: chat template: found a call of str\.encode"):
        render("{{ 'a'.encode() }}")
    with pytest.raises(TfmError, match="test: chat template: found the filter pprint"):
        render("{{ 'a' | pprint }}")
    assert render("{% if false %}{{ 'a' | pprint }}{% endif %}") == ""


@pytest.mark.parametrize("value", ["a", b"a", 1, 1.5, True, None, [1], (1,), {"a": 1}, {1}, range(3)], ids=repr)
def test_only_listed_methods_are_called(value: Any) -> None:
    """Whatever method Python has, or gets, is refused until it is known what it may cost."""
    kind: Any = next((kind for kind in METHODS if isinstance(value, kind)), None)
    for name in set(dir(value)) - set(METHODS.get(kind, ())):
        if callable(getattr(value, name)):
            with pytest.raises(TfmError, match=r"no template may make|is unsafe"):
                render(f"{{{{ (x | attr('{name}'))() }}}}", x=value)


def test_every_filter_and_test_of_jinja_is_known() -> None:
    """A filter that a later Jinja brings is refused as well, and none is listed that Jinja does not have."""
    environment = Environment(seconds=1.0)
    assert environment.filters.keys() - {"made ", "cut "} == jinja2.defaults.DEFAULT_FILTERS.keys()
    assert environment.tests.keys() == jinja2.defaults.DEFAULT_TESTS.keys()


def test_half_of_a_surrogate_pair() -> None:
    """A template that writes one was told as a fault of the user's text."""
    template = ChatTemplate('{{ "\\ud800" }}', "file.jinja", {})
    with pytest.raises(TfmError, match=r"file\.jinja: chat template: found half of a surrogate pair, U\+D800"):
        template.render([{"role": "user", "content": "a"}])
    echo = ChatTemplate("{{ messages[0].content }}", "file.jinja", {})
    assert echo.render([{"role": "user", "content": "\ud800"}]) == "\ud800"


def test_constants_are_not_computed_while_compiling() -> None:
    """Jinja computes constant expressions when it reads a template, before anything is counted."""
    begin = time.perf_counter()
    Template("{{ 'a' * 10 ** 11 }}{{ 9 ** 9 ** 9 }}{{ 'a' | center(10 ** 11) }}{{ [1] * 10 ** 11 }}", "test")
    assert time.perf_counter() - begin < 2


def test_long_conversations_are_not_refused() -> None:
    """What bounds the work must leave room for a long text and for many messages."""
    source = "{% for m in messages %}{{ '<' + m.role + '>' + m.content | trim + '</' ~ m.role ~ '>\n' }}{% endfor %}"
    long = [{"role": "user", "content": " " + "é" * 10_000_000}]
    assert len(Template(source, "test").render({"messages": long})) > 10_000_000
    many = [{"role": "user", "content": "x" * 100}] * 3000
    assert Template(source, "test").render({"messages": many}).count("\n") == 3000


def test_tracing_is_put_back() -> None:
    """The clock looks in by sys.settrace, which a debugger uses as well."""

    def trace(frame: object, event: str, argument: object) -> None:
        return None

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        render("x")
        with pytest.raises(TfmError):
            render("{{ raise_exception('x') }}")
        assert sys.gettrace() is trace
    finally:
        sys.settrace(previous)
