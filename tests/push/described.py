"""What the tests want to know of a message of OTLP profiles."""


def described(message):
    """The numbers that tell segments apart, and the total of the samples; checks that nothing is empty."""
    names = message.dictionary.string_table
    scopes = [scope for resource in message.resource_profiles for scope in resource.scope_profiles]
    assert scopes and all(scope.profiles for scope in scopes)
    total = 0
    for profile in [profile for scope in scopes for profile in scope.profiles]:
        assert profile.samples
        if names[profile.sample_type.unit_strindex] == "count":
            total += sum(sum(sample.values) if sample.values else len(sample.timestamps_unix_nano) for sample in profile.samples)
    marks = [name[len("/srv/app/") : -len(".py")] for name in names if name.startswith("/srv/app/")]
    return {"marks": [int(mark) for mark in marks if mark.isdigit()], "total": total}
