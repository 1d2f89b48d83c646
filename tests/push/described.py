"""What the tests want to know of a message of OTLP profiles."""


def described(message):
    """The numbers that tell segments apart, and the total of the samples, also by service and container; checks that nothing is
    empty."""
    names = message.dictionary.string_table
    scopes = [(of_resource(resource), scope) for resource in message.resource_profiles for scope in resource.scope_profiles]
    assert scopes and all(scope.profiles for _, scope in scopes)
    totals = {}
    for place, profile in [(place, profile) for place, scope in scopes for profile in scope.profiles]:
        assert profile.samples
        if names[profile.sample_type.unit_strindex] == "count":
            amounts = [sum(sample.values) if sample.values else len(sample.timestamps_unix_nano) for sample in profile.samples]
            totals[place] = totals.get(place, 0) + sum(amounts)
    marks = [name[len("/srv/app/") : -len(".py")] for name in names if name.startswith("/srv/app/")]
    return {"marks": [int(mark) for mark in marks if mark.isdigit()], "total": sum(totals.values()), "totals": totals}


def of_resource(resource):
    """Service and container of what was sampled."""
    attributes = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
    return attributes.get("service.name", "") + " in " + attributes.get("container.id", "none")
