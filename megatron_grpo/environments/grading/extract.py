"""Which part of a response is its answer. One rule, the same in training and evaluation; pure text.

1. After the last `</think>`; a `<think>` that is never closed has no answer.
2. The last complete `\\boxed{...}` or `\\fbox{...}`. Boxes joined by nothing but commas, "and" or
   "or" are one answer of several parts. A later box that is never closed takes the answer back.
3. Without a box: what follows the last `####`, else the last "answer is" or "answer:".
4. Else the last line, if that is one short answer by itself or names it after "is" or "=", or
   holds exactly one formula or number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=[{\d])")
_JOIN = re.compile(
    r"(?:\s|\$|\\[,;: ()\[\]]|,|;|\.(?=\s*$)|and\b|or\b|\\text\{\s*(?:and|or)\s*\})*"
)
_ASSIGNED = re.compile(r"[\s$]*[A-Za-z](?:_\{?\w\}?)?\s*=\s*$")
_PHRASE = re.compile(
    r"\b(?:answer|option|choice)(?:\s+is\b|\s*:|\s*=|\s+must\s+be\b|\s+equals\b)\s*:?",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|\n")
_ASIDE = re.compile(r",?\s+(?:because|since|as|which|where|so|when|but)\b.*", re.DOTALL)
_SPAN = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.])[-+\u2212]?(?:\d[\d,]*\d|\d)(?:\.\d+)?(?:/\d+)?%?")
_NAMED = re.compile(r"(?:\bis\b|\bequals\b|=|:)")
_LONGEST_LINE = 300
_LONGEST_BARE = 60


@dataclass(frozen=True, slots=True)
class Extraction:
    """The answer as it was written, or why there is none.

    >>> extract("So \\\\boxed{5}. No, \\\\boxed{\\\\frac{1}{3}}!").text
    '\\\\frac{1}{3}'

    Attributes:
        text: "" when there is none.
        problem: "" when there is one, else "no answer", "unclosed box" or "unfinished thinking".
    """

    text: str
    problem: str = ""


def extract(response: str) -> Extraction:
    """Apply the rules at the head of this module."""
    _, closed, said = response.rpartition("</think>")
    if "<think>" in (said if closed else response):
        return Extraction("", "unfinished thinking")
    text = said if closed else response
    boxes = _boxes(text)
    if boxes:
        return boxes_answer(text, boxes)
    text = text.replace("**", "")  # bold type
    for candidate in (_after_hashes(text), _after_phrase(text), _last_line(text)):
        if candidate:
            return Extraction(candidate)
    return Extraction("", "no answer")


def boxes_answer(text: str, boxes: list[tuple[int, int, str | None]]) -> Extraction:
    """The last box and those joined to it."""
    start, _, content = boxes[-1]
    if content is None:
        return Extraction("", "unclosed box")
    parts = [content]
    for earlier_start, earlier_end, earlier in reversed(boxes[:-1]):
        between = text[earlier_end:start]
        labelled = _ASSIGNED.search(between)
        if labelled:
            between = between[: labelled.start()]
        joined = earlier is not None and between.strip(" $\n") and _JOIN.fullmatch(between)
        if not joined:
            break
        parts.insert(0, earlier or "")
        start = earlier_start
    distinct = list(dict.fromkeys(part.strip() for part in parts))
    answer = ", ".join(distinct)
    return Extraction(answer) if answer.strip() else Extraction("", "no answer")


def _boxes(text: str) -> list[tuple[int, int, str | None]]:
    """(start, end, content) of every outermost box; content None where it is never closed."""
    found: list[tuple[int, int, str | None]] = []
    position = 0
    while match := _BOX.search(text, position):
        if text[match.end()] != "{":
            end = match.end() + 1  # \boxed 5: TeX takes one digit
            found.append((match.start(), end, text[match.end()]))
        else:
            end = closing_brace(text, match.end())
            if end < 0:
                found.append((match.start(), len(text), None))
                break
            found.append((match.start(), end, text[match.end() + 1 : end - 1]))
        position = end
    return found


def closing_brace(text: str, start: int) -> int:
    """Position after the brace that closes the one at `start`, -1 if none does. Escaped braces do
    not count.

    >>> closing_brace("{a{b}c}d", 0), closing_brace("{a", 0)
    (7, -1)
    """
    depth, position = 0, start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 2
            continue
        depth += (character == "{") - (character == "}")
        position += 1
        if depth == 0:
            return position
    return -1


def _after_hashes(text: str) -> str:
    _, hashes, said = text.rpartition("####")
    return said.strip().partition("\n")[0].strip() if hashes else ""


def _after_phrase(text: str) -> str:
    phrases = list(_PHRASE.finditer(text))
    if not phrases:
        return ""
    said = text[phrases[-1].end() :].strip()
    if said.startswith(("$$", "\\[")):  # a display may have line breaks in it
        match = _SPAN.match(said)
        if match:
            return _inside(match)
    return _tidy(_sentence(said))


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    if not lines or len(lines[-1]) > _LONGEST_LINE:
        return ""
    line = lines[-1]
    bare = _tidy(line)
    if len(lines) == 1 and len(bare) <= _LONGEST_BARE and " " not in bare.strip():
        return bare
    if len(bare) <= _LONGEST_BARE and not re.search(r"[A-Za-z]{3,}\s+[A-Za-z]{2,}", bare):
        return bare
    spans = list(_SPAN.finditer(line))
    if len(spans) == 1:
        return _inside(spans[0])
    if spans:
        return ""
    named = list(_NAMED.finditer(line))
    if named:
        last = _tidy(_sentence(line[named[-1].end() :]))
        if _NUMBER.match(last) and len(_NUMBER.findall(last)) == 1:
            return last
    numbers = _NUMBER.findall(line)
    return numbers[0] if len(numbers) == 1 else ""


def _inside(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None).strip()


def _sentence(text: str) -> str:
    """Up to the end of the sentence; a point inside a formula or a number does not end it."""
    position = 0
    while end := _SENTENCE_END.search(text, position):
        before = text[: end.start()]
        if before.count("$") % 2 == 0 and before.count("\\(") == before.count("\\)"):
            return before
        position = end.end()
    return text


def _tidy(text: str) -> str:
    """Without an aside ("5, because ...") and the full stop."""
    return _ASIDE.sub("", text).strip().rstrip(".!,;: ").strip()
