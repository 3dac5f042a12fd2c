"""One spelling for what is written in many ways: LaTeX commands, Unicode signs, spaces, markup.

Nothing here changes the value of an answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

_SIGNS: Mapping[str, str] = MappingProxyType(
    {
        "\u2212": "-", "\u2013": "-", "\u2014": "-", "\u00d7": "\\times ", "\u00b7": "\\cdot ",
        "\u22c5": "\\cdot ", "\u00f7": "/", "\u2044": "/", "\u03c0": "\\pi ", "\u221e": "\\infty ",
        "\u2264": "\\le ", "\u2265": "\\ge ", "\u2260": "\\ne ", "\u00b0": "^\\circ ",
        "\u00b1": "\\pm ", "\u222a": "\\cup ", "\u2229": "\\cap ", "\u2208": "\\in ",
        "\u2205": "\\emptyset ", "\u211d": "\\mathbb{R}", "\u221a": "\\sqrt ",
        "\u00bd": "\\frac{1}{2}", "\u00bc": "\\frac{1}{4}", "\u00be": "\\frac{3}{4}",
        "\u2153": "\\frac{1}{3}", "\u2154": "\\frac{2}{3}", "\u00b2": "^{2}", "\u00b3": "^{3}",
        "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u2248": "\\approx ", "\u20ac": "\\euro ",
        "\u27e8": "\\langle ", "\u27e9": "\\rangle ", "\u2019": "'", "\u03b8": "\\theta ",
    }
)  # fmt: skip
_SUPERSCRIPT_DIGITS = str.maketrans("\u2070\u00b9\u2074\u2075\u2076\u2077\u2078\u2079", "01456789")
_SUPERSCRIPTS = re.compile("[\u2070\u00b9\u2074\u2075\u2076\u2077\u2078\u2079]+")

# In order: each sees what the ones before it left.
_REWRITES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])\s*\.?(?=[^A-Za-z]|$)", ""),
        (r"\\(?:displaystyle|textstyle|limits|nolimits|boldsymbol|bm)(?![A-Za-z])", ""),
        (r"\\phantom\{[^{}]*\}", ""),
        (r"(?<=\d)(?:\{,\}|\\[,!;:]|\\ |~)\s?(?=\d{3}(?!\d))", ","),  # 10\,000
        (r"(?<=\d)(?:\\!)+,(?:\\!)*(?=\d{3}(?!\d))", ","),
        (r"\{,\}", ","),
        (r"(?<!\\)\\(?:[,;:> ]|!)|~|\\q?quad(?![A-Za-z])|\\hspace\{[^{}]*\}", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\frac\s*(\d)\s*(\d)(?!\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
        (r"(\\frac\{[^{}]*\})\s*(\d)(?![\d])", r"\1{\2}"),
        (r"\\sqrt\s*(\d+|[A-Za-z])(?![A-Za-z{])", r"\\sqrt{\1}"),
        (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\bsqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<![\\A-Za-z])(pi|infty|infinity)(?![A-Za-z])", r"\\\1 "),
        (r"\\infinity", r"\\infty"),
        (r"(?<![A-Za-z\\])oo(?![A-Za-z])|(?<![A-Za-z])inf(?![A-Za-z])", r"\\infty "),
        (r"\\(?:leqslant|leq)(?![A-Za-z])|<=", r"\\le "),
        (r"\\(?:geqslant|geq)(?![A-Za-z])|>=", r"\\ge "),
        (r"\\neq(?![A-Za-z])|!=", r"\\ne "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\(?:varnothing|O)(?![A-Za-z])|\\\{\s*\\\}", r"\\emptyset "),
        (r"\\R(?![A-Za-z])|\\mathbb\s*R|\\mathbf\{R\}", r"\\mathbb{R}"),
        (r"\^\s*\{\s*\\circ\s*\}|\\degree(?:s)?(?![A-Za-z])|\^\s*\\circ(?![A-Za-z])", r"^\\circ "),
        (r"\\(?:lvert|rvert|vert)(?![A-Za-z])", "|"),
        (r"\\(?:lbrace)(?![A-Za-z])", r"\\{"),
        (r"\\(?:rbrace)(?![A-Za-z])", r"\\}"),
        (r"\\%", "%"),
        (r"\\equiv(?![A-Za-z])", "="),
        (r"\\(?:overline|overrightarrow|vec|widehat|hat)\s*\{\s*([A-Z]{1,3})\s*\}", r"\1"),
        (r"\*\*", "^"),
        (r"(?<=[\d)}])\s*\*\s*(?=[\d(\\A-Za-z])", r"\\cdot "),
        (r"(?<=\d)\s*[xX]\s*(?=10\s*\^)", r"\\times "),
        (r"(?<=\\times)\s+(?=10\b)|(?<=\\cdot)\s+(?=10\b)", ""),
        (r"(?<=[\d}])\s+(?=\\(?:times|cdot)\s*10\s*\^)", ""),
        (r"10\s*\^\s*", "10^"),
    )
)
_TEXT = re.compile(
    r"\\(?:text|textbf|textit|textrm|textsf|texttt|mathrm|mathbf|mathit|mathsf|mbox|hbox|emph|"
    r"operatorname\*?|underline)\s*\{([^{}]*)\}"
)


def clean(text: str) -> str:
    """The answer in one spelling; `\\text{...}` and its relatives stay, as `\\text{...}`."""
    for sign, latex in _SIGNS.items():
        text = text.replace(sign, latex)
    text = _SUPERSCRIPTS.sub(
        lambda match: "^{" + match.group().translate(_SUPERSCRIPT_DIGITS) + "}", text
    )
    text = text.replace("\\$", "\\dollar ").replace("\\(", "").replace("\\)", "")
    text = re.sub(r"(?<!\\)\\\[|(?<!\\)\\\]", "", text)
    text = re.sub(r"\$(?=\s*\d)(?![^$]*\$)", r"\\dollar ", text).replace("$", "")
    text = _TEXT.sub(lambda match: "\\text{" + match.group(1).replace("\\ ", " ") + "}", text)
    text = re.sub(r"\\text\{\s*\}", " ", text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = re.sub(r"\s+", " ", text).strip()
    return strip_outer(text)


def strip_outer(text: str) -> str:
    """Without marks around it: full stop, comma, a leading "=" or "approximately"."""
    text = re.sub(
        r"^(?:=|\\therefore(?![A-Za-z])|\\approx(?![A-Za-z])|approximately|about|:)\s*",
        "",
        text.strip(),
    )
    text = re.sub(r"(?:\\\\|(?<!\.)\.|[,;:\s])+$", "", text)
    return text.strip()


def plain_words(text: str) -> str:
    """What is left when every \\text is opened.

    >>> plain_words("\\\\text{no solution}")
    'no solution'
    """
    return re.sub(r"\s+", " ", re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)).strip()
