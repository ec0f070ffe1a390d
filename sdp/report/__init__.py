"""Reports: datasets and runs as one page to look at. `sections` gathers, `page` lays out, `charts` draws."""
