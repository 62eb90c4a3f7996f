"""Read what others append to a file, line by line, without waiting."""

from pathlib import Path


class Tail:
    """The lines that join a file from now on; the file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # A line that a killed process did not end is ended, or cut off, by the next one.
        self._position = path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0
        self._partial = b""

    def new_lines(self) -> list[str]:
        """Whole lines that were appended since the last call, without their newlines."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                content = file.read()
        except FileNotFoundError:
            return []
        self._position += len(content)
        *lines, self._partial = (self._partial + content).split(b"\n")
        return [line.decode("utf-8", errors="replace") for line in lines]
