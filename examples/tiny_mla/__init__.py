"""A DeepSeek-V3-form MLA decoder and a DFlash-form drafter, small enough to ship."""
