"""Rewards that a check should find fault with."""


def never(response: str, answer: str, metadata: str) -> float:
    return 0.0
