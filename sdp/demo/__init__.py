"""What `make demo` and the tests run on: pictures that the project draws itself; nothing is fetched."""
