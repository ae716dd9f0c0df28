"""The command `tfm`."""


def main() -> None:
    raise SystemExit("tfm: not there yet")
