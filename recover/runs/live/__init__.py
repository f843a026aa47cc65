"""Monitoring while a run goes on: the live page, `recover status`, metrics, alerts. All of it reads records only."""
