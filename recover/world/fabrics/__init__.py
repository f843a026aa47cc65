"""Agreement, known deaths and small messages: what the protocol asks of a library that survives
deaths."""
