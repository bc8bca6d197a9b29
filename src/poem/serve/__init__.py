"""A service of many streams: one guarded adapter per stream, one model for all.

`engine.StreamEngine` works without HTTP; `front.build_app` puts HTTP before it; `client.Client` calls it. The modules
that need packages of the extra `serve` are `front` and `metrics`, and nothing imports them but `poem serve`.
"""
