"""One module per command. A module imports only what its options need; the rest inside."""
