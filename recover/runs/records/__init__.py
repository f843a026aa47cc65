"""The records of a run: their kinds, the files of JSON lines, the feed that reads them, causes of deaths, goodput."""
