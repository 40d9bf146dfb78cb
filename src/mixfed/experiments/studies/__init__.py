"""The packaged studies."""
