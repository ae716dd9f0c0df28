"""What chat templates may call: methods, filters and tests, each with bounds on its arguments.

A single operation runs in C, where no clock can interrupt it. So only what is listed here may be called; its time
and memory grow with the length of what it is given, and where they could grow faster, they are computed beforehand.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import BuiltinMethodType, MethodType
from typing import TYPE_CHECKING, Any, NoReturn, cast

from jinja2 import filters, pass_environment
from jinja2.exceptions import FilterArgumentError, SecurityError
from jinja2.nodes import EvalContext
from jinja2.tests import TESTS as ALL_TESTS
from jinja2.utils import Namespace

from tfm.engine.template_formats import Formatter, percent, to_json

if TYPE_CHECKING:
    from tfm.engine.template import Environment

LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
MOST_DIGITS = 100  # that a number is rounded to
Method = Callable[..., Any]


# ---- methods: (environment, subject, arguments as the method takes them) ----


def call_method(environment: "Environment", method: BuiltinMethodType | MethodType, args: Any, kwargs: Any) -> Any:
    """Raises SecurityError for a method that templates may not call."""
    subject, name = method.__self__, method.__name__
    kind: Any = next((kind for kind in METHODS if isinstance(subject, kind)), None)
    if kind is None or name not in METHODS[kind]:
        raise SecurityError(f"a call of {type(subject).__name__}.{name}, which no template may make")
    if isinstance(subject, str):
        subject = str.__str__(subject)  # not the method of a subclass
    bounded = METHODS[kind][name]
    if bounded is None:
        return getattr(kind, name)(subject, *args, **kwargs)
    return bounded(environment, subject, *args, **kwargs)


def _comparing(name: str) -> Method:
    """A method that may compare each character with each of what it looks for."""

    def method(environment: "Environment", text: str, *args: Any, **kwargs: Any) -> Any:
        for other in (*args, *kwargs.values()):
            if isinstance(other, str):
                environment.budget.compare(text, other)
        return getattr(str, name)(text, *args, **kwargs)

    return method


def _padded(name: str) -> Method:
    def method(environment: "Environment", text: str, width: int, *fill: str) -> Any:
        environment.budget.afford(len(text) + width)
        return getattr(str, name)(text, width, *fill)

    return method


def _split(environment: "Environment", text: str, sep: str | None = None, maxsplit: int = -1) -> list[str]:
    _bound_split(environment, text, sep, maxsplit)
    return text.split(sep, maxsplit)


def _rsplit(environment: "Environment", text: str, sep: str | None = None, maxsplit: int = -1) -> list[str]:
    _bound_split(environment, text, sep, maxsplit)
    environment.budget.compare(text, sep or "")
    return text.rsplit(sep, maxsplit)


def _bound_split(environment: "Environment", text: str, sep: str | None, maxsplit: int) -> None:
    pieces = len(text) // 2 if sep is None else text.count(sep)
    environment.budget.cut(text, 1 + (pieces if maxsplit < 0 else min(pieces, maxsplit)))


def _splitlines(environment: "Environment", text: str, keepends: bool = False) -> list[str]:
    environment.budget.cut(text, 1 + sum(map(text.count, LINE_ENDS)))
    return text.splitlines(keepends)


def _replace(environment: "Environment", text: str, old: str, new: str, count: int = -1) -> str:
    times = text.count(old)
    environment.budget.afford(len(text) + (times if count < 0 else min(times, count)) * len(new))
    return text.replace(old, new, count)


def _join_method(environment: "Environment", text: str, items: Iterable[Any]) -> str:
    return _join(environment, items, text)


def _format_method(environment: "Environment", text: str, *args: Any, **kwargs: Any) -> str:
    return Formatter(environment).vformat(text, args, kwargs)


METHODS: Mapping[type, Mapping[str, Method | None]] = {
    str: {
        **dict.fromkeys((
            "capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii",
            "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isspace", "istitle", "isupper", "lower",
            "partition", "removeprefix", "removesuffix", "startswith", "swapcase", "title", "upper",
        )),
        **{name: _comparing(name) for name in ("lstrip", "rfind", "rindex", "rpartition", "rstrip", "strip")},
        **{name: _padded(name) for name in ("center", "ljust", "rjust", "zfill")},
        "format": _format_method, "join": _join_method, "replace": _replace, "rsplit": _rsplit, "split": _split,
        "splitlines": _splitlines,
    },
    list: dict.fromkeys(("copy", "count", "index")),
    tuple: dict.fromkeys(("count", "index")),
    dict: dict.fromkeys(("copy", "get", "items", "keys", "values")),
}  # fmt: skip


# ---- filters: as Jinja calls them ----


def _bounded(name: str, bound: Callable[["Environment", Mapping[str, Any]], None]) -> Method:
    """Jinja's filter after a look at its arguments, by the names that they have in its signature."""
    function: Any = filters.FILTERS[name]
    signature = inspect.signature(function)
    signature = signature.replace(parameters=[p for p in signature.parameters.values() if p.name != "environment"])
    passed = str(getattr(function, "jinja_pass_arg", ""))  # what Jinja puts before the value

    @pass_environment
    def filtered(environment: "Environment", *args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs)
        arguments.apply_defaults()
        bound(environment, arguments.arguments)
        if passed:
            args = (environment if passed.endswith("environment") else EvalContext(environment), *args)
        return function(*args, **kwargs)

    return filtered


def _cuts(environment: "Environment", arguments: Mapping[str, Any]) -> None:
    value = arguments["value" if "value" in arguments else "s"]
    if isinstance(value, str):
        environment.budget.cut(value, len(value))


def _fills(environment: "Environment", arguments: Mapping[str, Any]) -> None:
    _cuts(environment, arguments)
    times = arguments["linecount" if "linecount" in arguments else "slices"]
    environment.budget.afford(times * environment.budget.weigh([arguments["fill_with"]]))


def _widens(environment: "Environment", arguments: Mapping[str, Any]) -> None:
    environment.budget.afford(len(str(arguments["value"])) + arguments["width"])


def _indents(environment: "Environment", arguments: Mapping[str, Any]) -> None:
    text, width = arguments["s"], arguments["width"]
    if not isinstance(text, str):
        raise FilterArgumentError(f"indent takes a text, found a {type(text).__name__}")
    lines = 1 + sum(map(text.count, LINE_ENDS))
    environment.budget.cut(text, lines)
    environment.budget.afford(len(text) + (lines + 1) * (len(width) if isinstance(width, str) else width))


def _rounds(environment: "Environment", arguments: Mapping[str, Any]) -> None:
    _number("round", arguments["value"])
    if abs(arguments["precision"]) > MOST_DIGITS:
        raise SecurityError(f"a number rounded to more than {MOST_DIGITS} digits")


def _number(name: str, value: Any) -> None:
    if not isinstance(value, int | float):
        raise FilterArgumentError(f"{name} takes a number, found a {type(value).__name__}")


@pass_environment
def _join(environment: "Environment", value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        value = map(filters.make_attrgetter(environment, attribute), value)
    if isinstance(value, str):
        environment.budget.cut(value, len(value))
    separator = str(d)
    texts, length = [], 0
    for item in value:
        environment.budget.weigh(item)
        texts.append(str(item))
        length += len(texts[-1]) + len(separator)
        environment.budget.afford(length)
    return separator.join(texts)


@pass_environment
def _replace_filter(environment: "Environment", s: Any, old: Any, new: Any, count: int | None = None) -> str:
    for value in (s, old, new):
        environment.budget.weigh(value)
    return _replace(environment, str.__str__(str(s)), str(old), str(new), -1 if count is None else count)


@pass_environment
def _trim(environment: "Environment", value: Any, chars: str | None = None) -> str:
    text = str(value)
    environment.budget.compare(text, chars or "")
    return text.strip(chars)


@pass_environment
def _format(environment: "Environment", value: Any, *args: Any, **kwargs: Any) -> str:
    if args and kwargs:
        raise FilterArgumentError("format takes values in order or by name, not both")
    return percent(environment.budget, str.__str__(str(value)), kwargs or args)


@pass_environment
def _sum(
    environment: "Environment", iterable: Iterable[Any], attribute: str | int | None = None, start: Any = 0
) -> Any:
    if attribute is not None:
        iterable = map(filters.make_attrgetter(environment, attribute), iterable)
    total = start
    for item in iterable:
        _number("sum", item)
        total += item
    _number("sum", total)
    return total


@pass_environment
def _tojson(environment: "Environment", value: Any, *args: Any, **kwargs: Any) -> str:
    return to_json(environment.budget, value, *args, **kwargs)


FILTERS: Mapping[str, Method] = {
    **{name: filters.FILTERS[name] for name in (
        "abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "int",
        "items", "last", "length", "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "safe", "select",
        "selectattr", "string", "truncate", "unique", "upper",
    )},
    **{name: _bounded(name, _cuts) for name in ("groupby", "list", "sort", "title", "wordcount")},
    **{name: _bounded(name, _fills) for name in ("batch", "slice")},
    "center": _bounded("center", _widens), "indent": _bounded("indent", _indents), "round": _bounded("round", _rounds),
    "format": _format, "join": _join, "replace": _replace_filter, "sum": _sum, "tojson": _tojson, "trim": _trim,
}  # fmt: skip


# ---- tests and functions ----


def _of_numbers(name: str) -> Method:
    """A test that computes value % number: of a text that would be a format."""

    def test(*values: Any) -> Any:
        for value in values:
            _number(name, value)
        return tested(*values)

    tested: Any = ALL_TESTS[name]
    return test


def _is_sequence(value: object) -> bool:
    """Jinja's own catches every exception, that of the clock too."""
    return hasattr(type(value), "__len__") and hasattr(type(value), "__getitem__")


TESTS: Mapping[str, Method] = {
    **{name: cast(Method, ALL_TESTS[name]) for name in (
        "!=", "<", "<=", "==", ">", ">=", "boolean", "callable", "defined", "eq", "equalto", "escaped", "false",
        "filter", "float", "ge", "greaterthan", "gt", "in", "integer", "iterable", "le", "lessthan", "lower", "lt",
        "mapping", "ne", "none", "number", "sameas", "string", "test", "true", "undefined", "upper",
    )},
    **{name: _of_numbers(name) for name in ("divisibleby", "even", "odd")},
    "sequence": _is_sequence,
}  # fmt: skip


def refused(what: str) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise SecurityError(f"{what}, which no template may use")

    return refuse


def make_dict(*pairs: Any, **items: Any) -> dict[Any, Any]:
    """dict(), which would put keys that collide into place in one long operation."""
    if len(pairs) > 1:
        raise TypeError(f"dict expected at most 1 argument, got {len(pairs)}")
    made = {}
    for given in pairs:
        for key, value in given.items() if isinstance(given, Mapping) else given:
            made[key] = value
    return {**made, **items}


class ShortNamespace(Namespace):
    """namespace(), which as a text would hold everything that is in it, however often."""

    def __init__(self, *pairs: Any, **items: Any) -> None:
        super().__init__(make_dict(*pairs, **items))

    def __repr__(self) -> str:
        return "<Namespace>"
