"""Units behind a number: what they are, and which measure the same thing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType

# name -> (what it measures, size). Names are singular and lower case.
_SIZES: Mapping[str, tuple[str, Fraction]] = MappingProxyType(
    {
        name: (measure, Fraction(size))
        for measure, units in {
            "length": {
                "mm": "1/1000", "cm": "1/100", "dm": "1/10", "m": "1", "km": "1000",
                "in": "254/10000", "ft": "3048/10000", "yd": "9144/10000", "mi": "1609344/1000",
            },
            "mass": {"mg": "1/1000", "g": "1", "kg": "1000", "t": "1000000"},
            "time": {"s": "1", "min": "60", "h": "3600", "day": "86400", "week": "604800"},
            "volume": {"ml": "1/1000", "l": "1"},
            "money": {"dollar": "1", "cent": "1/100"},
            "angle": {"degree": "1"},
        }.items()
        for name, size in units.items()
    }
)  # fmt: skip
_SYNONYMS: Mapping[str, str] = MappingProxyType(
    {
        "millimeter": "mm", "centimeter": "cm", "decimeter": "dm", "meter": "m", "metre": "m",
        "centimetre": "cm", "kilometre": "km", "kilometer": "km", "inch": "in", "inche": "in",
        "foot": "ft", "feet": "ft", "yard": "yd", "mile": "mi", "gram": "g", "kilogram": "kg",
        "milligram": "mg", "ton": "t", "tonne": "t", "second": "s", "sec": "s", "minute": "min",
        "hour": "h", "hr": "h", "liter": "l", "litre": "l", "milliliter": "ml", "usd": "dollar",
        "buck": "dollar", "deg": "degree", "mph": "mi/h", "kmh": "km/h", "kph": "km/h",
        "people": "person", "men": "man", "women": "woman", "children": "child",
    }
)  # fmt: skip
# Words that are no units where they stand behind a number.
_NO_UNITS = frozenset(
    re.findall(
        r"\w+",
        "and or sin cos tan cot sec csc log ln exp sqrt pi mod gcd lcm max min det infty to if "
        "for with where the is in",
    )
)
_SHORT = frozenset(
    re.findall(r"\w+", "m g s h l t L N J W V A K C F Hz kg km cm mm ml mL min in ft yd mi")
)
_WORD = r"[A-Za-z][A-Za-z'\-]*"
_POWER = r"(?:\s*\^\s*\{?\s*-?\d\s*\}?)?"
# Units that are read as such without a space; others would be variables.
_GLUED = r"(?:km|cm|mm|kg|mg|ml|mL|ft|mi|min|sec|mph)\b"
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_MODULUS = re.compile(r"(.*\S)\s*\(?\\(?:pmod|bmod|mod)\s*\{?\s*(\w+)\s*\}?\)?")
_TAIL = re.compile(
    rf"^(?P<number>.*(?:[\d}})!|]|\\pi))\s*"
    rf"(?P<unit>(?:\\text\{{[^{{}}]*\}}{_POWER}|(?:(?<=\s)|(?<=\d)(?={_GLUED})){_WORD}{_POWER})"
    rf"(?:(?:\s|/|\\cdot|\\text\{{[^{{}}]*\}}{_POWER}|{_WORD}{_POWER})+)?)$",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit in one spelling, e.g. "km/h", "cm^2", "dollar", "percent"; "" is none."""

    name: str = ""

    @property
    def size(self) -> tuple[str, Fraction] | None:
        """What it measures and how large it is; None where the table does not know."""
        base, caret, power = self.name.partition("^")
        known = _SIZES.get(base)
        if known is None or (caret and not power.isdigit()):
            return None
        exponent = int(power) if caret else 1
        return f"{known[0]}^{exponent}", known[1] ** exponent


def split_unit(text: str) -> tuple[str, Unit]:
    """The number and its unit.

    >>> split_unit("5 \\\\text{ inches}"), split_unit("50%"), split_unit("2x")
    (('5', Unit(name='in')), ('50', Unit(name='percent')), ('2x', Unit(name='')))
    """
    text = text.strip()
    if _TRIGONOMETRY.search(text):
        return text, Unit()  # the degrees of cos 60° are no unit of its value
    if modulus := _MODULUS.fullmatch(text):
        return modulus[1], Unit(f"mod {modulus[2]}")
    for mark, name in (("%", "percent"), ("^\\circ", "degree"), ("\\circ", "degree")):
        if text.endswith(mark) and len(text) > len(mark):
            return text[: -len(mark)].strip(), Unit(name)
    percent = re.fullmatch(r"(.*[\d})])\s*(?:\\text\{\s*)?(?:percent|per cent)\s*\}?", text)
    if percent:
        return percent[1].strip(), Unit("percent")
    degrees = re.fullmatch(r"(.*\d)\s*\^\\circ\s*(?:\\text\{\s*)?([CFK])\s*\}?", text)
    if degrees:
        return degrees[1], Unit(f"degree {degrees[2]}")
    money = re.fullmatch(r"(-?)\s*\\(?:dollar|euro|pounds)\s*(-?.+)", text)
    if money:
        unit = "euro" if "\\euro" in text else "dollar"
        number, _ = split_unit(money[2])
        return (money[1] + number).strip(), Unit(unit)
    match = _TAIL.match(text)
    if match and (name := _unit_name(match["unit"], spelled="\\text" in match["unit"])):
        return match["number"].strip(), Unit(name)
    return text, Unit()


def _unit_name(written: str, *, spelled: bool) -> str:
    """One spelling, "" if these words are no unit."""
    plain = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", written)
    plain = plain.replace("\\cdot", " ").replace("{", "").replace("}", "").strip(" .")
    plain = re.sub(r"\s*\^\s*", "^", plain)
    words = re.sub(r"\s*(?:/|\bper\b)\s*", " / ", plain).split()
    if not words:
        return ""
    for word in words:
        bare = word.partition("^")[0]
        if (
            bare.lower() in _NO_UNITS
            and bare not in ("min", "in")
            and not (spelled and bare == "sec")
        ):
            return ""
        if not spelled and len(bare) == 1 and bare not in _SHORT and bare != "/":
            return ""
    names: list[str] = []
    power = ""
    for word in words:
        lower = word.lower()
        if lower in ("square", "sq", "cubic", "cu"):
            power = "^2" if lower.startswith("sq") else "^3"
        elif lower == "/":
            names.append("/")
        elif lower not in ("of", "the", "a", "more", "total", "each", "old"):
            base, caret, exponent = lower.partition("^")
            names.append(_singular(base) + (caret + exponent if caret else power))
            power = ""
    return " ".join(names).replace(" / ", "/")


def _singular(word: str) -> str:
    for form in (word, word.removesuffix("s"), word.removesuffix("es")):
        if form in _SYNONYMS:
            return _SYNONYMS[form]
        if form in _SIZES:
            return form
    return word[:-1] if word.endswith("s") and len(word) > 3 else word
