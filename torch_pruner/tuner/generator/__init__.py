"""A language model that writes schedules, decision by decision (TLM, OSDI 2024)."""
