"""Which version counts as champion where somebody has moved the alias in MLflow itself.

MLflow does not say who moves an alias, and whoever reaches it can. So an alias moved there is obeyed where it does what
Draftsmith would do when asked: it goes back to a version that was champion before and was not rolled back from, as
`draftsmith rollback` does, or to one that the gate lets through. Any other is disputed: nothing stops, the champion
before it goes on to count, nothing is promoted over the head of whoever moved it, and every run names the commands
that settle it. So is a deleted alias: nights go on from the champion before it, and name what puts it back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from storage.history.records import PromotionRow

Refusal = Callable[[int, int | None], str]
"""(version, the champion that counts) -> why the gate does not let this version through; "" where it does."""


@dataclass(frozen=True)
class Standing:
    """The champion of a model that counts. number: its version; None: there is none.

    before: the one that counted before it, where it became champion in MLflow itself and was obeyed. disputed: the
    version that the alias names and that does not count, with why. is_deleted: there is no alias any more.
    """

    number: int | None
    before: int | None = None
    disputed: int | None = None
    why: str = ""
    is_deleted: bool = False

    @property
    def is_settled(self) -> bool:
        """Whether the champion that counts has the alias, or there is none."""
        return self.disputed is None and not self.is_deleted

    def sentence(self, name: str) -> str:
        """What is disputed, and first of all what settles it, in one line; "" where nothing is."""
        if self.is_settled:
            return ""
        back = f"`draftsmith rollback {name} --why ...` puts it back, " if self.number is not None else ""
        if self.is_deleted:
            return (
                f"somebody has deleted the alias champion of {name} in MLflow, which is not obeyed: version "
                f"{self.number} still counts, and nothing is promoted until {back}or `draftsmith promote {name} "
                "--version N --why ...` gives it to another"
            )
        counts = f"version {self.number} still counts" if self.number is not None else "there is no other champion"
        keep = f"`draftsmith promote {name} --version {self.disputed} --force --why ...`"
        return (
            f"somebody has made version {self.disputed} champion of {name} in MLflow, which is not obeyed: {counts}, "
            f"and nothing is promoted until {back}{keep} keeps it; {self.why}"
        )


def standing_of(
    champions: Iterable[PromotionRow], alias: int | None, refusal: Refusal, unfit: Callable[[int], str] = lambda _: ""
) -> Standing:
    """Go through the moves of a model's champion in one registry, oldest first.

    alias: where it is now; None: deleted. unfit: why a version cannot serve, whatever the gate says of it; "".
    """
    rows = list(champions)
    if not rows:  # a model that this home has published nothing of
        return Standing(alias)
    last_of_ours = max((n for n, row in enumerate(rows) if row.action != "external"), default=-1)
    number: int | None = None
    before: int | None = None
    at: int | None = None  # the alias, obeyed or not
    crowned, withdrawn, why = set[int](), dict[int, str](), ""

    def refused(version: int, champion: int | None) -> str:
        if version in withdrawn:
            return f"it was rolled back: {withdrawn[version]}"
        return "" if version in crowned else refusal(version, champion)

    for place, row in enumerate(rows):
        to = row.to_version
        if row.action != "external":
            assert to is not None, "Draftsmith deletes no alias but with its whole model"
            if row.action == "rollback" and at is not None and at != to:
                withdrawn[at] = row.why
            number, before, why = to, None, ""
            crowned.add(to)
            withdrawn.pop(to, None)
        elif place > last_of_ours and to is not None and to != number:
            why = refused(to, number)
            number, before = (number, before) if why else (to, number)
        at = to
    if alias is None:
        return Standing(number, is_deleted=number is not None)
    if alias not in (at, number):  # the log has lost that move
        why = refused(alias, number)
        number, before = (number, before) if why else (alias, number)
    if alias == number and before is not None and (why := unfit(alias)):
        number = before
    return Standing(number, before) if alias == number else Standing(number, None, alias, why)
