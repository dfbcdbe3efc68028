"""The machine with one thing changed: a condition turned round, a part left out, a sum turned into a difference."""

import ast
import copy
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from semel.core import machine

SOURCE = Path(machine.__file__)
MUTATED = {
    "decide", "standing", "differs", "_claim", "_begin", "is_apart", "_repeat", "_grant",
    "_to_granted", "_renew", "_settle", "_recreate", "_lookup",
    "_with_error", "_with_lease_end", "_forget", "_resolve", "_to_tombstone", "_next_fence", "_mine", "_renew_expiry",
}  # fmt: skip
TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


class Change(NamedTuple):
    """One change: in which function, to what, and the module that has it."""

    name: str
    tree: ast.Module

    def module(self) -> types.ModuleType:
        changed = types.ModuleType("changed_machine")
        exec(compile(self.tree, self.name, "exec"), changed.__dict__)
        return changed


def variants(node: ast.AST) -> Iterator[ast.AST]:
    """What one place of the program may be changed into."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in TURNED:
            other = copy.deepcopy(node)
            other.ops = [TURNED[type(op)]()]
            yield other
        case ast.BoolOp(values=values):
            for at in range(len(values)):
                fewer = copy.deepcopy(node)
                del fewer.values[at]
                yield fewer if len(fewer.values) > 1 else fewer.values[0]
        case ast.IfExp():
            yield copy.deepcopy(node.body)
            yield copy.deepcopy(node.orelse)
        case ast.BinOp(op=ast.Add()) if not isinstance(node.left, ast.Constant):
            less = copy.deepcopy(node)
            less.op = ast.Sub()
            yield less
        case ast.Call(func=ast.Name(id="replace"), keywords=keywords):
            for at in range(len(keywords)):
                without = copy.deepcopy(node)
                del without.keywords[at]
                yield without
        case ast.Call(func=ast.Name(id="abs"), args=[inside]):
            yield copy.deepcopy(inside)
        case ast.UnaryOp(op=ast.USub()):
            yield copy.deepcopy(node.operand)
        case ast.UnaryOp(op=ast.Not()):
            yield copy.deepcopy(node.operand)
        case _:
            pass


class Swap(ast.NodeTransformer):
    def __init__(self, number: int, new: ast.AST) -> None:
        self.left = number
        self.new = new

    def visit(self, node: ast.AST) -> ast.AST:
        if self.left == 0:
            self.left -= 1
            return ast.copy_location(self.new, node)
        self.left -= 1
        return self.generic_visit(node) if self.left >= 0 else node


def in_order(node: ast.AST) -> Iterator[ast.AST]:
    """As `Swap` walks."""
    yield node
    for child in ast.iter_child_nodes(node):
        yield from in_order(child)


def changes() -> list[Change]:
    """Every change, one at a time."""
    whole = ast.parse(SOURCE.read_text(encoding="utf-8"))
    found = []
    for at, function in enumerate(whole.body):
        if not isinstance(function, ast.FunctionDef) or function.name not in MUTATED:
            continue
        for number, node in enumerate(in_order(function)):
            for new in variants(node):
                changed: Any = ast.fix_missing_locations(Swap(number, new).visit(copy.deepcopy(function)))
                tree = ast.Module([*whole.body[:at], changed, *whole.body[at + 1 :]], [])
                found.append(Change(f"{function.name}: {ast.unparse(node)} -> {ast.unparse(new)}", tree))
    return found
