"""Names of the files in an output besides its parts."""

KIND = "samples"
IMAGES = "images/"


def image_name(row: int) -> str:
    """Return the name of the file that holds an address's picture."""
    return f"{IMAGES}{row:09d}.png"


DRAWN = "drawn"
"""The folder of pictures drawn on request, in the run, or in the working directory for a model."""
