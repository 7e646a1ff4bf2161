"""How many bytes there may be, of all keys and of one. Pure.

Without a limit of its own a key may have as many bytes as it leaves free: one alone has half, two have a third each. So
there is room for a key that has none, however many others take all they can get.

Beside the walks: catalog.py asks it. It knows no disk and no SQL.
"""

from dataclasses import dataclass

from gateway.errors import FilesFull


@dataclass(frozen=True, slots=True)
class Quota:
    max_bytes: int
    max_bytes_per_key: int | None = None

    def check(self, owner: str, more: int, used: int, used_by_owner: int) -> None:
        """May `owner` have so many more? Without keys all is of one owner, "", who may have everything.

        Raises FilesFull.
        """
        free = self.max_bytes - used - more
        if free < 0:
            raise FilesFull(
                f"There is no room for {more} bytes: {used} of the {self.max_bytes} for files and batches are taken. "
                "Delete files, or come again when others have expired."
            )
        most = self.max_bytes_per_key
        if most is None:
            most = free + used_by_owner + more if not owner else max(free, 0)
        if used_by_owner + more > most:
            raise FilesFull(
                f"There is no room for {more} bytes: files and batches of this key have {used_by_owner}, and may have "
                f"{most} now. Delete files or ended batches."
            )
