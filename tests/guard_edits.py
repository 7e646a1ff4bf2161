"""Remove a guard from a source file, located by its function and a few words."""

import ast
import textwrap
from collections.abc import Iterator

Named = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Source:
    """The text of a file.

    Each edit returns the whole new text. It raises ValueError unless its place exists exactly once.
    """

    def __init__(self, text: str) -> None:
        self._bytes = text.encode()  # the syntax tree counts columns in bytes
        self._line_starts = [0]
        for line in self._bytes.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))

    def without_statement(self, function: str, words: str) -> str:
        """Replace the statement that begins with `words` by `pass`."""
        scope = self._named(function)
        spans = [self._span(node) for node in ast.walk(scope) if isinstance(node, ast.stmt) and node is not scope]
        found = [span for span in spans if self._bytes[slice(*span)].startswith(words.encode())]
        if len(found) != 1:
            raise ValueError(f"{function} holds {len(found)} statements that begin with {words!r}")
        return self._spliced(found[0], "pass")

    def with_body(self, function: str, body: str) -> str:
        """Replace the body of the function by `body`."""
        scope = self._named(function)
        span = self._span(scope.body[0])[0], self._span(scope.body[-1])[1]
        return self._spliced(span, textwrap.indent(body, " " * scope.body[0].col_offset).lstrip())

    def with_words(self, function: str, old: str, new: str) -> str:
        """Replace `old` by `new` in the function or class, or in the whole file if none is named."""
        start, end = self._span(self._named(function)) if function else (0, len(self._bytes))
        count = self._bytes.count(old.encode(), start, end)
        if count != 1:
            raise ValueError(f"{function or 'the file'} holds {count} times {old!r}")
        start = self._bytes.index(old.encode(), start, end)
        return self._spliced((start, start + len(old.encode())), new)

    def _named(self, function: str) -> Named:
        found = [node for name, node in _definitions(ast.parse(self._bytes), "") if name == function]
        if len(found) != 1:
            raise ValueError(f"there are {len(found)} definitions of {function}")
        return found[0]

    def _span(self, node: ast.stmt) -> tuple[int, int]:
        """Return the span, decorators included."""
        first = min([node, *getattr(node, "decorator_list", ())], key=lambda part: part.lineno)
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self._line_starts[first.lineno - 1] + first.col_offset
        return start, self._line_starts[node.end_lineno - 1] + node.end_col_offset

    def _spliced(self, span: tuple[int, int], new: str) -> str:
        return (self._bytes[: span[0]] + new.encode() + self._bytes[span[1] :]).decode()


def _definitions(node: ast.AST, outer: str) -> Iterator[tuple[str, Named]]:
    """Yield definitions with their qualified names, such as `Class.method` and `function.inner`."""
    for child in ast.iter_child_nodes(node):
        name = outer
        if isinstance(child, Named):
            name = f"{outer}.{child.name}".lstrip(".")
            yield name, child
        yield from _definitions(child, name)
