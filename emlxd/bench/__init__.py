"""Measures any OpenAI-compatible endpoint from the client's side."""
