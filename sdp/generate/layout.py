"""The names of what lies in an output besides its parts."""

KIND = "samples"
IMAGES = "images/"
SHEET = "contact-sheet.png"


def image_name(row: int) -> str:
    """Where the picture of an address lies as a file of its own."""
    return f"{IMAGES}{row:09d}.png"
