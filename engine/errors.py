"""What the user can mend: one class, raised where the fault is seen, printed once."""


class TfmError(Exception):
    """A fault that a person can act on, told in one line.

    what names the file, tensor, field or option; found is what stood there; allowed is what may; do is the remedy.
    """

    def __init__(self, what: str, found: object = None, allowed: object = None, do: str | None = None) -> None:
        parts = [what if found is None else f"{what}: found {found}"]
        if allowed is not None:
            parts.append(f"allowed: {allowed}")
        if do is not None:
            parts.append(do)
        super().__init__("; ".join(parts).replace("\n", " "))
