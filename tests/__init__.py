"""The tests. A package, since some library installs one of the same name."""
