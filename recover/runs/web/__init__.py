"""Style and charts that the live page and the report have in common. `vendor/` holds unmodified files of others."""
