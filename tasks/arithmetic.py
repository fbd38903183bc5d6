"""Arithmetic with a calculator: one tool, and a reward for the right number at the end.

user        (37 * 48) - 519
assistant   <tool_call>{"name": "calculate", "arguments": {"expression": "37 * 48 - 519"}}</tool_call>
tool        1257
assistant   1257                                                                           reward 1
"""

import ast
import operator
import random
import re

import datasets

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
LONGEST = 200  # characters of an expression


def dataset(size: int = 4096, seed: int = 0, highest: int = 99) -> datasets.Dataset:
    """Expressions of three numbers and their values."""
    rng = random.Random(seed)
    expressions = []
    for _ in range(size):
        a, b, c = (rng.randint(2, highest) for _ in range(3))
        first, second = rng.choices("+-*", k=2)
        expressions.append(f"({a} {first} {b}) {second} {c}")
    prompts = [[{"role": "user", "content": expression}] for expression in expressions]
    return datasets.Dataset.from_dict({"prompt": prompts, "answer": list(map(value_of, expressions))})


def value_of(expression: str) -> int:
    """The value of whole numbers under + - * and brackets; ValueError for anything else, which is not run."""
    if len(expression) > LONGEST:
        raise ValueError(f"an expression may have {LONGEST} characters")

    def value(node):
        if isinstance(node, ast.Expression):
            return value(node.body)
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError("only whole numbers, + - * and brackets")

    try:
        return value(ast.parse(expression.strip(), mode="eval"))
    except SyntaxError as error:
        raise ValueError(f"this cannot be read: {expression}") from error


def calculate(expression: str) -> int:
    """Calculate.

    Args:
        expression: whole numbers with + - * and brackets
    """
    return value_of(expression)


def is_right(prompts, completions, completion_ids, answer, **columns) -> list[float]:
    """1.0 where the last number of the last message is the answer."""
    texts = [completion[-1]["content"] or "" if completion else "" for completion in completions]
    numbers = [re.findall(r"-?\d+", text) for text in texts]
    return [float(bool(n) and int(n[-1]) == right) for n, right in zip(numbers, answer, strict=True)]


rewards = [is_right]
tools = [calculate]
