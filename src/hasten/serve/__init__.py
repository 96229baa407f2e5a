"""An OpenAI-compatible server for one machine (extra: serve); see `hasten.serve.app`."""
