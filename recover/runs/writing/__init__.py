"""Writing of records: one surviving rank writes, and all of them keep the latest lines."""
