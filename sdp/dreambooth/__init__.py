"""DreamBooth: one subject, from a handful of pictures to a model that draws it."""
