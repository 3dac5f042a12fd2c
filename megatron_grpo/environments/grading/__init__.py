"""Grading of mathematical answers; docs/grading.md states the rules.

    response --extract--> answer as written --clean, structure--> parts --compare--> equal or not
                                            numbers: exact fractions; expressions: math-verify

All of it runs in the killable workers of `pool`.
"""
