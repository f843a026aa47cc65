"""Looking on while a run goes: the live page, `recover status`, metrics, alerts. All of it is read from records."""
