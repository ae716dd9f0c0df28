"""Chat templates: programs in Jinja that come with a model and write a conversation down.

They are rendered as transformers renders them (trim_blocks, lstrip_blocks, loop controls, `generation` blocks, tojson,
strftime_now, raise_exception) in Jinja's immutable sandbox, which keeps Python's internals out of reach. A template
comes from a stranger, so its work is bounded as well: by time, and by how many characters its operations make
altogether, counted beforehand where an operation can make much out of little.
"""

import functools
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from types import FrameType
from typing import Any, NoReturn, TypeVar

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from tfm.engine.errors import TfmError

F = TypeVar("F", bound=Callable[..., Any])

RENDER_SECONDS = 5.0
CHARACTERS = 1 << 26  # made in one rendering, besides EACH_INPUT for every character of the conversation
EACH_INPUT = 8
ITEM_CHARACTERS = 8  # what an item of a list counts beside its content
LARGEST_BITS = 4096
MADE, CUT = "made ", "cut "  # filters that no template can name
WIDENING = {
    "batch", "center", "expandtabs", "format", "format_map", "indent", "join", "ljust", "rjust", "slice", "wordwrap",
    "zfill",
}  # fmt: skip
WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(\*|\d{5})")
WIDE_BRACE = re.compile(r"\{[^{}]*(\{|:[^{}]*\d{5})")
WIDE_TIME = re.compile(r"%[-_0^#+]*\d")
FAULTS = (
    jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError,
    ValueError,
)  # fmt: skip


class Template:
    """A compiled chat template. name says in errors where it stands; seconds is how long it may take to render."""

    def __init__(self, source: str, name: str, seconds: float = RENDER_SECONDS) -> None:
        self._name, self._seconds = name, seconds
        self._environment = _Environment()
        self._lock = threading.Lock()
        try:
            self._compiled = self._environment.from_string(source)
        except FAULTS as error:
            raise TfmError(f"{name}: chat template", _message(error), "a Jinja template") from error

    def render(self, variables: Mapping[str, object]) -> str:
        """The text. Raises TfmError when the template fails, refuses the conversation or does what no template may."""
        with self._lock:
            budget = self._environment.budget = _Budget(CHARACTERS + EACH_INPUT * _weigh(variables, sys.maxsize))
            try:
                with _Deadline(self._seconds):
                    pieces = []
                    for piece in self._compiled.generate(variables):
                        budget.spend(len(piece))
                        pieces.append(piece)
            except FAULTS as error:
                raise TfmError(f"{self._name}: chat template", _message(error), do="or use --raw") from error
        return "".join(pieces)


def _message(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    line = getattr(error, "lineno", None)
    return text if line is None else f"{text} (line {line})"


class _Deadline:
    """Within it every line of Python that runs in this thread looks at the clock, so that no loop goes on for ever."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        end = time.monotonic() + self._seconds

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            if time.monotonic() > end:
                raise SecurityError(f"still running after {self._seconds:g} s")
            return trace

        self._previous = sys.gettrace()
        sys.settrace(trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._previous)


class _Budget:
    """How many characters may still be made."""

    def __init__(self, characters: int) -> None:
        self._left = characters

    def afford(self, characters: int) -> None:
        if characters > self._left:
            raise SecurityError("it makes more text than a conversation needs")

    def spend(self, characters: int) -> None:
        self.afford(characters)
        self._left -= characters

    def made(self, value: object) -> None:
        """Count a value that an operation has made: what it takes itself, while its items may be shared.

        Its whole content must be affordable, so that no later operation on it takes long.
        """
        self.weigh(value)
        self.spend(_own_size(value))

    def weigh(self, value: object) -> int:
        weight = _weigh(value, self._left)
        self.afford(weight)
        return weight

    def before(self, name: str, operands: Iterable[object]) -> None:
        """Look at what a filter or method is given, where the result may be larger than all of it."""
        operands = list(operands)
        texts = [operand for operand in operands if isinstance(operand, str)]
        pattern = texts[0].replace("{{", "") if texts and name in ("format", "format_map") else ""
        if WIDE_PERCENT.search(pattern) or WIDE_BRACE.search(pattern):
            raise SecurityError("a format with a width beyond 9999")
        if name == "replace" and len(texts) == 3:
            text, old, new = texts
            self.afford(len(text) + text.count(old) * len(new))
        elif name in WIDENING:
            product = 1
            for operand in operands:
                product *= max(1, abs(operand) if isinstance(operand, int) else self.weigh(operand))
            self.afford(product)


def _weigh(value: object, most: int) -> int:
    """The characters in a value, those of items many times over counted as often; stops soon after most."""
    if isinstance(value, str | bytes):
        return len(value)
    items: Iterable[object]
    if isinstance(value, Mapping):
        items = (part for item in value.items() for part in item)
    elif isinstance(value, list | tuple | set | frozenset):
        items = value
    else:
        return 1
    weight = 0
    for item in items:
        weight += ITEM_CHARACTERS + _weigh(item, most - weight)
        if weight > most:
            break
    return weight


def _own_size(value: object) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    return ITEM_CHARACTERS * len(value) if isinstance(value, list | tuple | dict | set | frozenset) else 1


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with the additions of transformers, in which every operation that makes something is counted."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        self.budget = _Budget(CHARACTERS)
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=self._put_out,
            optimized=False,  # it would compute constants while compiling, uncounted
        )
        self.filters |= {"tojson": _tojson, "join": _join, MADE: lambda value: value}
        self.filters = {name: self._counted(name, function) for name, function in self.filters.items()}
        self.filters[CUT] = self._cut
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def _put_out(self, value: Any) -> Any:
        """Each value that is put out, to the text or into a block of it, comes by here."""
        self.budget.spend(self.budget.weigh(value))
        return value

    def _cut(self, value: Any) -> Any:
        self.budget.spend(_own_size(value))
        return value

    def _counted(self, name: str, function: F) -> F:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.budget.before(name, (*args, *kwargs.values()))
            result = function(*args, **kwargs)
            self.budget.made(result)
            return result

        return counted  # type: ignore[return-value]

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        subject = getattr(__obj, "__self__", None) or getattr(getattr(__obj, "__wrapped__", None), "__self__", None)
        if isinstance(subject, str | bytes | list | tuple):
            if __obj.__name__ == "join" and isinstance(subject, str) and len(args) == 1:
                return __self.filters["join"](__self, args[0], subject)
            __self.budget.before(__obj.__name__, (subject, *args, *kwargs.values()))
        __self.budget.weigh((args, kwargs))  # a macro may keep them as varargs
        result = super().call(__context, __obj, *args, **kwargs)
        __self.budget.made(result)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            self.budget.before("format", (left, right))
        elif operator == "*" and isinstance(left, int) != isinstance(right, int):
            values, times = (right, left) if isinstance(left, int) else (left, right)
            if not isinstance(values, float):
                self.budget.afford(self.budget.weigh(values) * max(0, times))
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > LARGEST_BITS:
                raise SecurityError("a number too large")
        elif operator == "+":
            self.budget.afford(self.budget.weigh(left) + self.budget.weigh(right))
        result = super().call_binop(context, operator, left, right)
        self.budget.made(result)
        return result

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Counted().visit(Parser(self, source, name, filename).parse())
        return tree


class _Counted(NodeTransformer):
    """Sends by a filter what a template makes without calling anything.

    `[a, b]` becomes `[a, b] | made`, `a[1:]` becomes `a[1:] | cut`, and `a ~ b` is `[a, b] | join`.
    """

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno, environment=node.environment), "join")

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return _filtered(self.generic_visit(node), MADE)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return _filtered(self.generic_visit(node), MADE)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, MADE) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, CUT) if isinstance(node.arg, nodes.Slice) else node


def _filtered(node: nodes.Node, name: str) -> nodes.Node:
    assert node.environment is not None
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno).set_environment(node.environment)


class _Generation(Extension):
    """{% generation %} marks, for training, what the assistant wrote; here it only stands for what is inside."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@jinja2.pass_environment
def _join(environment: _Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    """Jinja's filter, which looks at the length before it is reached."""
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    texts, length = [], 0
    for item in value:
        environment.budget.weigh(item)
        texts.append(str(item))
        length += len(texts[-1]) + len(d)
        environment.budget.afford(length)
    return str(d).join(texts)


def _tojson(
    value: object, ensure_ascii: bool = False, indent: int | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:  # fmt: skip
    """JSON as transformers writes it in templates: letters as they are, nothing escaped for HTML."""
    if indent is not None and indent > 100:
        raise SecurityError("an indent beyond 100")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(format: str) -> str:
    if len(format) > 1000 or WIDE_TIME.search(format):
        raise SecurityError("a time format with a width")
    return datetime.now().strftime(format)
