"""A reward with a spread on random models: the share of characters that are even digits."""


def even_digits(response: str, answer: str, metadata: str) -> float:
    return sum(c in "02468" for c in response) / max(1, len(response))


def always_wrong(response: str, answer: str, metadata: str) -> float:
    return 0.0


def even_digit_turn(problem: object, turns: list[str]) -> float:
    """The same for dialogues; the first turn ends them."""
    return even_digits(turns[-1], "", "{}")
