"""Chat templates: programs in Jinja that come with a model and write a conversation down.

They are rendered as transformers renders them (trim_blocks, lstrip_blocks, loop controls, `generation` blocks, tojson,
strftime_now, raise_exception) in Jinja's immutable sandbox, which keeps Python's internals out of reach. A template
comes from a stranger, so its work is bounded as well: by time, by what it may call (`template_calls`), and by how many
characters its operations make altogether (`template_budget`).
"""

import functools
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import BuiltinMethodType, FrameType, MethodType
from typing import Any, NoReturn, TypeVar

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import FilterArgumentError, SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS as ALL_FILTERS
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.tests import TESTS as ALL_TESTS
from jinja2.utils import Cycler, Joiner
from jinja2.visitor import NodeTransformer

from tfm.engine.errors import TfmError
from tfm.engine.template_budget import LARGEST_BITS, Budget, own_size, weigh
from tfm.engine.template_calls import FILTERS, TESTS, ShortNamespace, call_method, make_dict, refused
from tfm.engine.template_formats import percent, strftime_now

F = TypeVar("F", bound=Callable[..., Any])

RENDER_SECONDS = 5.0
LATE_AT_MOST = 2  # conversations in turn that took longer; then no other is tried: ten thousand rows would take a day
LONGEST_SOURCE = 1 << 18  # ten times the longest of the published ones
CHARACTERS = 1 << 26  # made in one rendering, besides EACH_INPUT for every character of the conversation
EACH_INPUT = 8
MADE, CUT = "made ", "cut "  # filters that no template can name
FAULTS = (
    jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip


class Template:
    """A compiled chat template. name says in errors where it stands; seconds bounds reading it, and each rendering."""

    def __init__(self, source: str, name: str, seconds: float = RENDER_SECONDS) -> None:
        self._name, self._seconds = name, seconds
        self._environment = Environment(seconds)
        self._lock = threading.Lock()
        self._late = 0  # conversations in turn for which the time did not do
        if len(source) > LONGEST_SOURCE:
            raise TfmError(f"{name}: chat template", f"{len(source)} characters", f"at most {LONGEST_SOURCE}")
        try:
            with _Deadline(self._environment.budget, lines=False):
                self._compiled = self._environment.from_string(source)
        except (*FAULTS, SyntaxError) as error:  # Python's: its limits on nesting, and a break outside a loop
            raise TfmError(f"{name}: chat template", _message(error), "a Jinja template") from error

    def render(self, variables: Mapping[str, object]) -> str:
        """The text. Raises TfmError when the template fails, refuses the conversation or does what no template may."""
        with self._lock:
            if self._late == LATE_AT_MOST:
                found = f"still running after {self._seconds:g} s, {LATE_AT_MOST} times in turn"
                raise TfmError(f"{self._name}: chat template", found, do="or use --raw")
            characters = CHARACTERS + EACH_INPUT * weigh(variables, sys.maxsize)
            budget = self._environment.budget = Budget(characters, self._seconds)
            try:
                with _Deadline(budget):
                    pieces = []
                    for piece in self._compiled.generate(variables):
                        budget.spend(len(piece))
                        pieces.append(piece)
            except FAULTS as error:
                self._late = self._late + 1 if budget.is_over else 0
                raise TfmError(f"{self._name}: chat template", _message(error), do="or use --raw") from error
            self._late = 0
        return "".join(pieces)


def _message(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return error.msg  # its line is one of the program that Jinja made of the template
    text = str(error).encode(errors="replace").decode() or type(error).__name__
    line = getattr(error, "lineno", None)
    return text if line is None else f"{text} (line {line})"


class _Deadline:
    """Within it every line of Python that runs in this thread looks at the clock, so that no loop goes on for ever.

    An exception of the clock that is lost (in a generator that is closed, say) ends this; operations look as well.

    Without lines, every call of a function does: enough for Jinja's compiler, which takes time in the square of some
    sources' lengths, and faster.
    """

    def __init__(self, budget: Budget, lines: bool = True) -> None:
        self._budget, self._lines = budget, lines

    def __enter__(self) -> None:
        end, clock, lines = self._budget.end, time.monotonic, self._lines

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            if clock() > end:
                self._budget.look_at_clock()
            return trace if lines else None

        self._previous = sys.gettrace()
        sys.settrace(trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._previous)


class _Generator(CodeGenerator):
    """Computes no constants while compiling, uncounted."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with the additions of transformers, in which every operation that makes something is counted."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)
    code_generator_class = _Generator

    def __init__(self, seconds: float) -> None:
        self.budget = Budget(CHARACTERS, seconds)
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=self._put_out,
            optimized=False,
        )
        self.filters = {name: refused(f"the filter {name}") for name in ALL_FILTERS}
        self.filters |= {name: self._counted(function) for name, function in FILTERS.items()}
        self.filters |= {MADE: self._counted(lambda value: value), CUT: self._cut}
        tests: dict[str, Any] = {name: refused(f"the test {name}") for name in ALL_TESTS}
        self.tests = tests | dict(TESTS)
        self.globals = {
            "range": self.globals["range"], "dict": make_dict, "namespace": ShortNamespace, "cycler": Cycler,
            "joiner": Joiner, "raise_exception": _raise_exception, "strftime_now": strftime_now,
        }  # fmt: skip
        self._functions = tuple(self.globals.values())

    def _put_out(self, value: Any) -> Any:
        """Each value that is put out, to the text or into a block of it, comes by here."""
        self.budget.spend(self.budget.weigh(value))
        return value

    def _cut(self, value: Any) -> Any:
        self.budget.spend(own_size(value))
        return value

    def _counted(self, function: F) -> F:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            try:
                result = function(*args, **kwargs)
            except AssertionError as error:  # Jinja's way to refuse an argument
                raise FilterArgumentError(str(error)) from error
            self.budget.made(result)
            return result

        return counted  # type: ignore[return-value]

    def wrap_str_format(self, value: Any) -> None:
        """format is bounded with the other methods, when it is called."""

    def getitem(self, obj: Any, argument: Any) -> Any:
        """As in the sandbox, which catches every exception in between, that of the clock too."""
        try:
            return obj[argument]
        except (TypeError, LookupError):
            missing = self.undefined(obj=obj, name=argument)
        if not isinstance(argument, str):
            return missing
        value = getattr(obj, str.__str__(argument), missing)
        if value is missing or self.is_safe_attribute(obj, argument, value):
            return value
        return self.unsafe_undefined(obj, argument)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.budget.weigh((args, kwargs))  # a macro may keep them as varargs
        if __self._is_own(__obj) or not callable(__obj):
            result = super().call(__context, __obj, *args, **kwargs)
        elif isinstance(__obj, BuiltinMethodType | MethodType):
            given = {name: value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")}
            result = call_method(__self, __obj, args, given)
        else:
            raise SecurityError(f"a call of a {type(__obj).__name__}, which no template may make")
        __self.budget.made(result)
        return result

    def _is_own(self, called: Any) -> bool:
        """Whether it is a part of the template's language, or a function that all templates know."""
        if any(called is function for function in self._functions):
            return True
        subject = called.__self__ if isinstance(called, MethodType) else called
        return isinstance(subject, BlockReference | Cycler | Joiner | LoopContext | Macro | jinja2.Undefined)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            result: Any = percent(self.budget, str.__str__(left), right)
            self.budget.made(result)
            return result
        if operator == "*" and isinstance(left, int) != isinstance(right, int):
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


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))
