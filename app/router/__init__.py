"""Which replica runs a request, and when: a pure core and the Serve deployment that drives it."""
