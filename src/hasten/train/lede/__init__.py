"""LEDE's offline side: experience on disk, a simulator over it, the agent that learns from it."""
